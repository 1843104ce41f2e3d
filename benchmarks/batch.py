"""Questions over documents in the planned order, against the order of the input.

    python -m benchmarks.batch [--short] [--json F] [--check] [--seed N] [--model M]

What a retriever's candidates are judged by (benchmarks/batch_job.py): 248 questions, each about one
or two of 55 documents that are drawn for it, "does this text help to answer that question?". Rows
go question by question as a retriever lists them, to an engine in this process, 8 at a time, as
`rakv batch run --in-process` does. Its RAM holds a third of the documents and it has no disk: the
case in which order matters. Where all documents fit, any order finds them.
Three arms one after another, each with an engine of its own that starts empty (engines side by side
in one process would slow each other down): the input's order without cache, the same with cache,
and the planned order with cache. About 12 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.batch_job import DOCUMENT_TOKENS, load_job
from benchmarks.common import Options, Requirement, finish, parse_options, table
from rakv_cluster.batch.journal import Journal
from rakv_cluster.batch.local_engine import local_engine
from rakv_cluster.batch.rows import Job
from rakv_cluster.batch.runner import run_rows
from rakv_cluster.client import Answer, Document, Message
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import Settings, load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer

CLOCK = SystemClock()
MAX_TOKENS, WINDOW = 4, 8
_DOCUMENT_BYTES = DOCUMENT_TOKENS * 30 * 2 * 3 * 64 * 4  # of SmolLM2-135M in float32
BOUNDS = {"over no cache": 2.5, "over input order with cache": 1.3}

Reuse = Literal["exact", "off"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way through the job: wall seconds, share of prompt tokens that were cached, texts in the
    input's order."""

    name: str
    total_s: float
    reused: float
    texts: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    tokenizer = load_tokenizer(resolve(names.model, load_settings().cache_path))
    job, origin = load_job(
        {"max_tokens": MAX_TOKENS, "temperature": 0},
        Random(options.seed),
        lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
        0.15 if options.short else 1.0,
    )
    planned = job.plan()
    given = tuple(range(len(job.rows)))
    settings = load_settings(
        {"model": names.model, "ram_budget_bytes": len(job.documents) * _DOCUMENT_BYTES // 3}
    )
    arms = [
        asyncio.run(_measure(name, job, order, reuse, settings))
        for name, order, reuse in (
            ("input order, no cache", given, "off"),
            ("input order", given, "exact"),
            ("planned order", planned.order, "exact"),
        )
    ]
    return _report(options, origin, job, arms, planned.reused / planned.total)


async def _measure(
    name: str, job: Job, order: Sequence[int], reuse: Reuse, settings: Settings
) -> Arm:
    """Seconds from the first row to the last, of an engine that has answered before."""
    with tempfile.TemporaryDirectory(prefix="rakv-batch-") as folder:
        async with local_engine(settings, CLOCK) as engine:

            async def ask(index: int) -> Answer:
                row = job.rows[index]
                return await engine.chat(
                    [Message("user", row.question)],
                    [Document(job.documents[name], name) for name in row.documents],
                    {**job.options, "reuse": reuse},
                )

            await engine.chat([Message("user", "Ready?")], [], {"max_tokens": 1})
            with Journal(Path(folder) / "journal", job.digest) as journal:
                started_s = CLOCK.monotonic_s()
                await run_rows(order, ask, journal, window=WINDOW)
                total_s = CLOCK.monotonic_s() - started_s
                results = list(journal.results(len(job.rows)))
    failed = [result.error for result in results if result.failed]
    if failed:
        raise SystemExit(f"{name}: {len(failed)} rows failed: {failed[0]}")
    cached = sum(result.cached_tokens for result in results)
    prompt = sum(result.prompt_tokens for result in results)
    print(f"{name}: {len(results)} rows in {total_s:.1f} s", flush=True)
    return Arm(name, total_s, cached / prompt, tuple(result.text for result in results))


def _report(options: Options, origin: str, job: Job, arms: Sequence[Arm], expected: float) -> int:
    rows = [
        [arm.name, len(job.rows), arm.total_s, len(job.rows) / arm.total_s, f"{arm.reused:.0%}"]
        for arm in arms
    ]
    different = len({row.question for row in job.rows})
    print(f"{len(job.documents)} documents of {DOCUMENT_TOKENS} tokens: {origin}")
    print(f"{len(job.rows)} rows, {different} different questions")
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
    results = {
        "documents": origin,
        "questions": different,
        "expected": expected,
        "arms": [asdict(arm) for arm in arms],
    }
    return finish(options, results, requirements)


def _extra() -> argparse.ArgumentParser:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="what answers")
    return extra


if __name__ == "__main__":
    sys.exit(main())
