"""Prompts to calibrate a model by: documents of a folder, or help texts of the standard library."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rakv_cluster.errors import ConfigError
from rakv_cluster.reuse.calibrating import shuffled_prompt
from rakv_cluster.reuse.fidelity import FidelityPrompt, Ids
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.template import Document, Message, document_text

PROMPTS = 16
"""So many are measured unless more or fewer are asked for."""

DOCUMENT_TOKENS = 200
STANDARD_LIBRARY = "standard library"
"""What a calibration calls its texts where there was no folder."""

_SYSTEM = "You are a helpful assistant. Answer from the documents."
_QUESTION = "Summarize what the documents say about {name}."
_DOCUMENTS = 6
_MODULES = (
    "argparse", "asyncio", "calendar", "codecs", "collections", "configparser", "copy", "csv",
    "datetime", "decimal", "difflib", "email", "fractions", "ftplib", "getopt", "heapq", "hmac",
    "inspect", "ipaddress", "json", "logging", "mailbox", "math", "multiprocessing", "optparse",
    "os", "pathlib", "pickle", "random", "re", "sched", "shelve", "shutil", "socket", "sqlite3",
    "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "timeit", "tokenize", "trace", "unittest", "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip


def calibration_prompts(
    renderer: PromptRenderer,
    folder: Path | None = None,
    *,
    count: int = PROMPTS,
    tokens: int = DOCUMENT_TOKENS,
) -> list[FidelityPrompt]:
    """Prompts of six documents of about so many ``tokens`` each, all different; raises
    :class:`ConfigError` for too few texts."""
    rng = np.random.default_rng(1)
    pieces = list(_pieces(_texts(folder), 4 * tokens, count * _DOCUMENTS))
    if len(pieces) < count * _DOCUMENTS:
        raise ConfigError(
            f"{folder or 'the standard library'} gives {len(pieces)} documents of about {tokens} "
            f"tokens; {count} prompts need {count * _DOCUMENTS}"
        )
    order = rng.permutation(len(pieces))
    cases = []
    for start in range(0, count * _DOCUMENTS, _DOCUMENTS):
        chosen = [pieces[index] for index in order[start : start + _DOCUMENTS]]
        # Asked about the last one; the donors were asked about the first.
        (front, documents, question), (_, _, donor_question) = (
            _parts(renderer, chosen, name) for name, _ in (chosen[-1], chosen[0])
        )
        cases.append(
            shuffled_prompt(front, documents, question, rng, donor_question=donor_question)
        )
    return cases


def _parts(
    renderer: PromptRenderer, chosen: Sequence[tuple[str, str]], name: str
) -> tuple[Ids, tuple[Ids, ...], Ids]:
    """What stands in front of the documents, they themselves, and the question about ``name``."""
    question = _QUESTION.format(name=name)
    documents = [Document(text, each) for each, text in chosen]
    if renderer.chats:
        rendered = renderer.chat([Message("system", _SYSTEM), Message("user", question)], documents)
        if rendered.documents:
            first, last = rendered.documents[0], rendered.documents[-1]
            segments = rendered.segments
            between = segments[first : last + 1]
            return _joined(segments[:first]), between, _joined(segments[last + 1 :])
    texts = [document_text(document) for document in documents]
    front, *apart, behind = renderer.apart([f"{_SYSTEM}\n\n", *texts, question])
    return front, tuple(apart), behind


def _pieces(
    texts: Iterator[tuple[str, str]], characters: int, wanted: int
) -> Iterator[tuple[str, str]]:
    """Texts cut into documents of about so many characters, at line ends; some of each text."""
    share = 8
    taken = 0
    for name, text in texts:
        lines: list[str] = []
        of_this = 0
        for line in text.splitlines(keepends=True):
            lines.append(line)
            if sum(map(len, lines)) >= characters:
                yield name, "".join(lines)
                lines = []
                of_this += 1
                taken += 1
            if of_this == share or taken >= 4 * wanted:
                break


def _texts(folder: Path | None) -> Iterator[tuple[str, str]]:
    if folder is None:
        for name in _MODULES:
            yield name, pydoc.plain(pydoc.render_doc(name))
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        yield path.stem, path.read_text(encoding="utf-8", errors="ignore")


def _joined(segments: Sequence[Ids]) -> Ids:
    return tuple(token_id for segment in segments for token_id in segment)
