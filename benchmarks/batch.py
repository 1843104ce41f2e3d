"""Questions over documents in the planned order, against the order of the input.

    python -m benchmarks.batch [--short] [--json F] [--check] [--seed N] [--model M]

Every question is asked about every document over HTTP of a real server, 8 rows at a time as
`rakv batch` does. Its RAM tier holds a third of the documents and it has no disk tier: the case in
which order matters. Three arms, each on a server of its own with an empty cache: the input's order
(question by question) without cache, the same with cache, and the planned order with cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.common import Options, Requirement, finish, parse_options, shared_data, table
from benchmarks.corpus import QUESTION_TEMPLATES, load_corpus
from rakv_cluster.batch.journal import Journal
from rakv_cluster.batch.rows import Job, Row
from rakv_cluster.batch.runner import run_rows
from rakv_cluster.cli.local_service import local_service
from rakv_cluster.client import Answer, AsyncClient, Document
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer

CLOCK = SystemClock()
DOCUMENT_TOKENS, QUESTIONS, MAX_TOKENS, WINDOW = 300, 5, 4, 8
SMOLLM2_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
BOUNDS = {"over no cache": 2.5, "over input order with cache": 1.3}

Reuse = Literal["exact", "off"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way through the job: wall seconds, share of prompt tokens that were cached, texts."""

    name: str
    total_s: float
    reused: float
    texts: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    tokenizer = load_tokenizer(resolve(names.model, load_settings().cache_path))
    count = 6 if options.short else 40
    corpus = load_corpus(
        1,
        count,
        DOCUMENT_TOKENS,
        count_tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    documents = {f"d{i}": text for i, text in enumerate(corpus.sets[0].documents)}
    job = _job(documents)
    planned = job.plan()
    given = tuple(range(len(job.rows)))
    arms = [
        _measure("input order, no cache", job, given, "off", names.model),
        _measure("input order", job, given, "exact", names.model),
        _measure("planned order", job, planned.order, "exact", names.model),
    ]
    return _report(options, corpus.origin, job, arms, planned.reused / planned.total)


def _job(documents: dict[str, str]) -> Job:
    """Every question about every document, question by question, as prompts files are read."""
    rows = tuple(
        Row(f"{number}/{name}", question.format(name=name), (name,))
        for number, question in enumerate(_questions())
        for name in documents
    )
    return Job(rows, documents, "", {"max_tokens": MAX_TOKENS, "temperature": 0})


def _questions() -> list[str]:
    """The first of MuSiQue where its documents are used, else templates."""
    musique = shared_data() / "musique" / "musique_dev.json"
    if not musique.exists():
        return [*QUESTION_TEMPLATES, "Which name stands first in the text about {name}?"]
    rows = json.loads(musique.read_text())[:QUESTIONS]
    return [row["question"].replace("{", "{{").replace("}", "}}") for row in rows]


def _measure(name: str, job: Job, order: Sequence[int], reuse: Reuse, model: str) -> Arm:
    third = len(job.documents) * DOCUMENT_TOKENS * SMOLLM2_BYTES_PER_TOKEN // 3
    with tempfile.TemporaryDirectory(prefix="rakv-batch-") as folder:
        flags = {"model": model, "ram-budget": str(third), "set": "store=memory"}
        log = Path(folder) / "service.log"
        with (
            local_service(flags, log=log, clock=CLOCK) as service,
            Journal(Path(folder) / "journal", job.digest) as journal,
        ):
            started_s = CLOCK.monotonic_s()
            asyncio.run(_ask_all(job, order, reuse, service.base_url, journal))
            total_s = CLOCK.monotonic_s() - started_s
            results = list(journal.results(len(job.rows)))
    failed = [result.error for result in results if result.failed]
    if failed:
        raise SystemExit(f"{name}: {len(failed)} rows failed: {failed[0]}")
    cached = sum(result.cached_tokens for result in results)
    prompt = sum(result.prompt_tokens for result in results)
    print(f"{name}: {len(results)} rows in {total_s:.1f} s", flush=True)
    return Arm(name, total_s, cached / prompt, tuple(result.text for result in results))


async def _ask_all(
    job: Job, order: Sequence[int], reuse: Reuse, url: str, journal: Journal
) -> None:
    async with AsyncClient(url, retries=NO_RETRIES) as client:

        async def ask(index: int) -> Answer:
            row = job.rows[index]
            documents = [Document(job.documents[name], name) for name in row.documents]
            return await client.chat(
                row.question,
                documents=documents,
                reuse=reuse,
                max_tokens=MAX_TOKENS,
                temperature=0,
            )

        await run_rows(order, ask, journal, window=WINDOW)


def _report(options: Options, origin: str, job: Job, arms: Sequence[Arm], expected: float) -> int:
    rows = [
        [arm.name, len(job.rows), arm.total_s, len(job.rows) / arm.total_s, f"{arm.reused:.0%}"]
        for arm in arms
    ]
    print(f"{len(job.documents)} documents of {DOCUMENT_TOKENS} tokens: {origin}")
    print(table(rows, ["arm", "rows", "s", "rows/s", "reused"]))
    print(f"planner's expectation: {expected:.0%} of characters")
    without, given, planned = arms
    gains = {
        "over no cache": without.total_s / planned.total_s,
        "over input order with cache": given.total_s / planned.total_s,
    }
    equal = sum(a == b for a, b in zip(without.texts, planned.texts, strict=True))
    requirements = [Requirement(name, gains[name], ">=", BOUNDS[name]) for name in BOUNDS]
    requirements.append(Requirement("equal texts", equal / len(job.rows), ">=", 1.0))
    results = {"documents": origin, "expected": expected, "arms": [asdict(arm) for arm in arms]}
    return finish(options, results, requirements)


def _extra() -> argparse.ArgumentParser:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="what to serve")
    return extra


if __name__ == "__main__":
    sys.exit(main())
