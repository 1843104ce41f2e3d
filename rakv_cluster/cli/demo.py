"""``rakv demo``: the point of the project in one table.

Asks questions about a few real documents over HTTP: with an empty cache, again about the same
documents, and once more after the whole service was restarted. Every question is also asked with
``reuse: off``; the answers must be the same text.
"""

from __future__ import annotations

import pydoc
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rakv_cluster.cli.local_service import LocalService, local_service
from rakv_cluster.client import Answer, Client, Document, Options
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.clock import Clock, SystemClock

DOCUMENT_MODULES = ("shelve", "fnmatch", "bisect", "contextlib")
DOCUMENT_CHARS = 2000
MAX_TOKENS = 48
QUESTIONS = (
    ("empty cache", "Which of these modules stores Python objects on disk?"),
    ("same documents", "Which of these modules matches file names against patterns?"),
    ("after a restart", "Which of these modules keeps a list in sorted order?"),
)


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One question: its answer with the cache and the same question answered without."""

    label: str
    cached: Answer
    plain: Answer

    @property
    def speedup(self) -> float:
        """Time to first token without the cache over the one with it."""
        return self.plain.ttft_s / self.cached.ttft_s

    @property
    def same_text(self) -> bool:
        """Whether the cache changed nothing."""
        return self.cached.text == self.plain.text


def demo(
    *,
    model: Annotated[str, typer.Option(help="Model name, folder or Hugging Face id.")] = "smollm2",
) -> None:
    """Ask about documents, ask again, restart, ask once more; show what was not recomputed."""
    if not run_demo(model=model, console=Console(soft_wrap=True), clock=SystemClock()):
        raise typer.Exit(1)


def demo_documents() -> list[Document]:
    """Help texts of standard-library modules: real documents that every Python has."""
    return [
        Document(pydoc.plain(pydoc.render_doc(name))[:DOCUMENT_CHARS], name)
        for name in DOCUMENT_MODULES
    ]


def run_demo(*, model: str, console: Console, clock: Clock) -> bool:
    """Run the whole demo in a folder of its own; returns whether all texts were equal."""
    with tempfile.TemporaryDirectory(prefix="rakv-demo-") as folder:
        # Without the warm-up: what is on disk is to be seen coming from there.
        flags = {"model": model, "store-dir": f"{folder}/store", "set": "warm_up_s=0"}
        log = Path(folder) / "service.log"
        rows: list[DemoRow] = []
        console.print(f"Starting a one-node service with {model} (log: {log}) ...")
        with local_service(flags, log=log, clock=clock) as service:
            rows += [_ask(service, *question, clock) for question in QUESTIONS[:2]]
        console.print("Stopped. Starting it again on the same store folder ...")
        with local_service(flags, log=log, clock=clock) as service:
            rows += [_ask(service, *question, clock) for question in QUESTIONS[2:]]
    console.print(demo_table(rows))
    equal = all(row.same_text for row in rows)
    console.print(
        "All texts equal those of a run without cache."
        if equal
        else "[red]A text differs from the run without cache: please report this.[/red]"
    )
    return equal


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """What happened, one line per question."""
    title = "Time to first token (TTFT) at the client"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("question", no_wrap=True)
    # Narrow enough for 80 columns, which is also what a pipe gets.
    for heading in ("TTFT\nms", "without\ncache", "ratio", "prompt\ntokens", "from\nRAM",
                    "from\ndisk", "tokens\nper s", "same\ntext"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        tokens = row.cached.rakv["tokens"]
        table.add_row(
            row.label,
            f"{row.cached.ttft_s * 1e3:.0f}",
            f"{row.plain.ttft_s * 1e3:.0f}",
            f"{row.speedup:.1f}x",
            str(row.cached.usage["prompt_tokens"]),
            str(tokens["ram"]),
            str(tokens["disk"]),
            f"{row.cached.tokens_per_s:.1f}",
            "yes" if row.same_text else "NO",
        )
    return table


def _ask(service: LocalService, label: str, question: str, clock: Clock) -> DemoRow:
    options: Options = {"max_tokens": MAX_TOKENS, "temperature": 0, "reuse": "exact"}
    without: Options = {**options, "reuse": "off"}
    documents = demo_documents()
    with Client(service.base_url, retries=NO_RETRIES, clock=clock) as client:
        plain = client.chat(question, documents=documents, **without)
        cached = client.chat(question, documents=documents, **options)
    return DemoRow(label, cached, plain)
