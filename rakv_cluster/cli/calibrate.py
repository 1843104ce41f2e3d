"""``rakv calibrate``: what blending costs a model in fidelity, kept where its replicas look."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rakv_cluster.config import load_settings
from rakv_cluster.errors import ConfigError

if TYPE_CHECKING:
    from rakv_cluster.reuse.calibration import Calibration
    from rakv_cluster.reuse.fidelity import FidelityPrompt, Ids
    from rakv_cluster.serving.prompting import PromptRenderer

_SYSTEM = "You are a helpful assistant. Answer from the documents."
_QUESTION = "Summarize what the documents say about {name}."
_DOCUMENTS = 6
_FEWEST_PROMPTS = 4
_MODULES = (
    "argparse", "asyncio", "calendar", "codecs", "collections", "configparser", "copy", "csv",
    "datetime", "decimal", "difflib", "email", "fractions", "ftplib", "getopt", "heapq", "hmac",
    "inspect", "ipaddress", "json", "logging", "mailbox", "math", "multiprocessing", "optparse",
    "os", "pathlib", "pickle", "random", "re", "sched", "shelve", "shutil", "socket", "sqlite3",
    "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "timeit", "tokenize", "trace", "turtle", "unittest", "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip


def calibrate(
    model: Annotated[
        str | None, typer.Option("--model", help="A model as `rakv serve --model` takes it.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            help="Folder of text files like those that will be asked about; default: help texts "
            "of Python's standard library.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=_FEWEST_PROMPTS, help="Prompts to measure.")] = 16,
    document_tokens: Annotated[
        int, typer.Option(min=16, help="About so many tokens in each of a prompt's 6 documents.")
    ] = 200,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Cache folder of the service.")
    ] = None,
) -> None:
    """Measure how far blended answers are from full recompute, by the share that is repaired.

    `reuse: blend` obeys the curve from the service's next start on. Takes minutes.
    """
    given = {"model": model, "cache_dir": cache_dir}
    settings = load_settings({name: value for name, value in given.items() if value is not None})
    # Imported late: the other commands must not wait for torch.
    from rakv_cluster.model.fetch import resolve  # noqa: PLC0415
    from rakv_cluster.model.loader import load_model  # noqa: PLC0415
    from rakv_cluster.reuse.calibrating import measure_curves  # noqa: PLC0415
    from rakv_cluster.reuse.calibration import (  # noqa: PLC0415
        Calibration,
        calibration_path,
        save_calibration,
    )
    from rakv_cluster.reuse.probing import probe_settings  # noqa: PLC0415
    from rakv_cluster.serving.prompting import PromptRenderer  # noqa: PLC0415

    console = Console()
    loaded = load_model(
        resolve(settings.model, settings.cache_path),
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads_per_replica,
    )
    if loaded.rotation.refusal:
        raise ConfigError(f"this model cannot blend: {loaded.rotation.refusal}")
    renderer = PromptRenderer(loaded.tokenizer)
    cases = _prompts(renderer, texts, prompts, document_tokens)
    origin = str(texts) if texts else "standard library"
    path = calibration_path(settings.cache_path, loaded.card.digest)
    curves = measure_curves(
        loaded.runner,
        loaded.rotation,
        cases,
        loaded.card.eos_token_ids,
        probe=probe_settings(loaded.card.layout.layers),
    )
    for done, found in enumerate(curves, start=1):
        console.print(f"{done} of {len(cases)} prompts", highlight=False)
        if done < _FEWEST_PROMPTS:
            continue
        # Kept as it grows: an interrupted run leaves what it measured.
        calibration = Calibration(loaded.card.model_id, done, origin, found.plain, found.probed)
        save_calibration(calibration, path)
    _show(console, calibration, path)


def _show(console: Console, calibration: Calibration, path: Path) -> None:
    for title, points in (
        ("without the question probe", calibration.points),
        ("with the question probe", calibration.probed),
    ):
        table = Table(
            "repaired", "KL mean", "KL p95 (upper)", "top-1 equal", "greedy tokens equal",
            title=title,
        )  # fmt: skip
        for point in points:
            table.add_row(
                f"{point.fraction:.0%}",
                f"{point.kl:.3f} [{point.kl_low:.3f}, {point.kl_high:.3f}]",
                f"{point.kl_p95:.3f} ({point.kl_p95_upper:.3f})",
                f"{point.top1:.0%} [{point.top1_low:.0%}, {point.top1_high:.0%}]",
                f"{point.agreement:.0%} [{point.agreement_low:.0%}, {point.agreement_high:.0%}]",
            )
        console.print(table)
    for budget in (0.05, 0.1, 0.2):
        for probed in (False, True):
            choice = calibration.choose(budget, probed=probed)
            met = choice.refusal or f"repair {choice.fraction:.0%}"
            way = "with" if probed else "without"
            console.print(f"max_kl {budget}, {way} probe: {met}", highlight=False, soft_wrap=True)
    console.print(f"kept in {path}", highlight=False, soft_wrap=True)


def _prompts(
    renderer: PromptRenderer, folder: Path | None, count: int, tokens: int
) -> list[FidelityPrompt]:
    """Prompts of six documents of their own each; raises :class:`ConfigError` for too few texts."""
    from rakv_cluster.reuse.calibrating import shuffled_prompt  # noqa: PLC0415

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
    from rakv_cluster.serving.template import Document, Message  # noqa: PLC0415

    messages = [Message("system", _SYSTEM), Message("user", _QUESTION.format(name=name))]
    rendered = renderer.chat(messages, [Document(text, each) for each, text in chosen])
    if not rendered.documents:
        raise ConfigError("this model's chat template does not keep documents apart")
    first, last = rendered.documents[0], rendered.documents[-1]
    segments = rendered.segments
    return _joined(segments[:first]), segments[first : last + 1], _joined(segments[last + 1 :])


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
