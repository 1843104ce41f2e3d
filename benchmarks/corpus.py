"""Documents and questions for benchmarks: shared data where present, else installed sources."""

from __future__ import annotations

import json
import pydoc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import shared_data

STDLIB_MODULES = (
    "abc", "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "cmd", "codecs",
    "collections", "concurrent.futures", "configparser", "contextlib", "copy", "csv", "ctypes",
    "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email", "enum",
    "fileinput", "fnmatch", "fractions", "ftplib", "functools", "getopt", "gettext", "glob",
    "gzip", "hashlib", "heapq", "hmac", "html", "http.client", "imaplib", "inspect", "io",
    "ipaddress", "itertools", "json", "logging", "mailbox", "math", "mimetypes", "multiprocessing",
    "netrc", "numbers", "operator", "optparse", "os", "pathlib", "pickle", "platform", "plistlib",
    "poplib", "pprint", "queue", "random", "re", "sched", "secrets", "selectors", "shelve",
    "shlex", "shutil", "signal", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "stat",
    "statistics", "string", "struct", "subprocess", "symtable", "tarfile", "tempfile", "textwrap",
    "threading", "timeit", "tokenize", "trace", "traceback", "types", "typing", "unicodedata",
    "unittest", "urllib.parse", "uuid", "warnings", "weakref", "webbrowser", "zipfile",
)  # fmt: skip
QUESTION_TEMPLATES = (
    "What is {name} for? Answer in one sentence.",
    "Name one thing that {name} offers, and why it is useful.",
    "Summarize what the text about {name} says.",
    "Which errors or limits does the text about {name} mention?",
)


@dataclass(frozen=True, slots=True)
class DocumentSet:
    """Documents that belong together and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[str, ...]

    def api_documents(self) -> list[dict[str, str]]:
        """The ``documents`` field of a request."""
        return [{"id": f"d{i}", "text": text} for i, text in enumerate(self.documents)]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Document sets and, for the benchmark's header, where they are from."""

    origin: str
    sets: tuple[DocumentSet, ...]


def load_corpus(
    sets: int, documents: int, tokens: int, *, count_tokens: Callable[[str], int]
) -> Corpus:
    """``sets`` disjoint document sets; each document is cut to about ``tokens`` tokens.

    Raises ``ValueError`` if neither source has enough documents that long.
    """
    musique = shared_data() / "musique" / "musique_dev.json"
    if musique.exists():
        origin, texts = f"MuSiQue ({musique})", _musique(musique)
    else:
        origin, texts = "help texts of Python's standard library", _stdlib()
    pieces = list(trimmed(texts, sets * documents, tokens, count_tokens))
    if len(pieces) < sets * documents:
        raise ValueError(f"{origin}: only {len(pieces)} documents of {tokens} tokens")
    return Corpus(
        origin,
        tuple(
            _document_set(pieces[start : start + documents])
            for start in range(0, sets * documents, documents)
        ),
    )


def _document_set(pieces: Sequence[tuple[str, str]]) -> DocumentSet:
    names = [name for name, _ in pieces]
    questions = [
        template.format(name=names[i % len(names)]) for i, template in enumerate(QUESTION_TEMPLATES)
    ]
    return DocumentSet(tuple(text for _, text in pieces), tuple(questions))


def trimmed(
    texts: Iterator[tuple[str, str]], wanted: int, tokens: int, count_tokens: Callable[[str], int]
) -> Iterator[tuple[str, str]]:
    """The first ``wanted`` long enough texts, cut by characters to about ``tokens`` tokens."""
    for name, text in texts:
        if wanted == 0:
            return
        length = count_tokens(text)
        if length >= tokens:
            wanted -= 1
            yield name, text[: len(text) * tokens // length]


def _musique(path: Path) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for row in json.loads(path.read_text()):
        for passage in row["ctxs"]:
            text = passage["text"]
            if text not in seen:
                seen.add(text)
                yield passage.get("title") or text.split("\n")[0][:60], text


def _stdlib() -> Iterator[tuple[str, str]]:
    for name in STDLIB_MODULES:
        yield name, pydoc.plain(pydoc.render_doc(name))[:20_000]
