"""The engine against transformers' generate, the memory bandwidth and itself alone.

    python -m benchmarks.engine [--short] [--json F] [--check] [--seed N]
        [--only decode,...] [--threads 2] [--model smollm2]

``service`` starts Ray: run it in a loopback-only network namespace (scripts/loopback).

All arms run in one process, one after the other within each round; figures are medians over the
rounds. Ratios are taken within a round first, so that a slow spell of the machine hits both sides.
Whatever else computes does so in a thread that ends, so that no arm runs beside another's OpenMP
threads (see :mod:`rakv_cluster.model.threads`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.corpus import load_corpus
from benchmarks.engine_rig import (
    Answer,
    Rig,
    generate_gap_s,
    peak_mib,
    read_seconds,
    resident_mib,
    stock_prefill_s,
    weight_bytes,
)
from benchmarks.engine_service import guard, service
from rakv_cluster.config import load_settings
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer
from rakv_cluster.model.step import Span, Step
from rakv_cluster.model.threads import aside
from rakv_cluster.types import ReuseMode, SamplingParams

SHORT_CONTEXT, LONG_CONTEXT = 64, 1700
ANSWERS = (48, 128)
"""Tokens of the answers to prompts of 450: the gain of computing four together depends on them,
because prompts gain nothing from company (their products are bound by arithmetic, not memory)."""

SOAK_RAM_BYTES = 128 << 20

PREFILLS = {1024: 1.0, 2048: 1.0, 4096: 1.1}


@dataclass(slots=True)
class Report:
    """Figures by name, and what they have to meet."""

    results: dict[str, Any] = field(default_factory=dict)
    requirements: list[Requirement] = field(default_factory=list)

    def add(self, name: str, value: float, relation: str = "", bound: float = 0.0) -> None:
        """Note a figure; with a relation it is a requirement."""
        self.results[name] = value
        if relation in (">=", "<="):
            self.requirements.append(Requirement(name, value, relation, bound))  # type: ignore[arg-type]  # narrowed by the test


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int
    tokens: int
    soak_requests: int


Measurement = Callable[[Rig, Scale, Report], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    folder = Path(resolve(names.model, load_settings().cache_path))
    rig = Rig(folder, _text_ids(folder, options), threads=names.threads)
    scale = Scale(2, 16, 60) if options.short else Scale(5, 48, 2000)
    report = Report({"after loading, MiB": resident_mib()})
    chosen = names.only.split(",") if names.only else list(MEASUREMENTS)
    for name in chosen:
        print(f"... {name}", flush=True)
        MEASUREMENTS[name](rig, scale, report)
    rig.engine.stop()
    report.add("peak memory, MiB (both models)", peak_mib())
    print(table(list(report.results.items()), ("figure", "value")))
    return finish(options, report.results, report.requirements)


def decode(rig: Rig, scale: Scale, report: Report) -> None:
    """One request: milliseconds per token against generate and the bandwidth floor."""
    size = weight_bytes(rig.stock)
    floors = []
    for context, speedup in ((SHORT_CONTEXT, 1.4), (LONG_CONTEXT, 1.7)):
        ours, theirs = [], []
        for _ in range(scale.rounds):
            ids = rig.ids(context)
            ours.append(statistics.median(rig.ask(ids, scale.tokens).wait().gaps_s))
            theirs.append(aside(partial(generate_gap_s, rig.stock, ids, scale.tokens)))
            floors.append(aside(partial(read_seconds, size)))
        report.add(f"decode ms/token at {context}", statistics.median(ours) * 1e3)
        report.add(f"generate ms/token at {context}", statistics.median(theirs) * 1e3)
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        report.add(f"decode speedup over generate at {context}", ratio, ">=", speedup)
        if context == SHORT_CONTEXT:
            floor_s = statistics.median(floors)
            report.add("bandwidth floor ms/token", floor_s * 1e3)
            ours_s = statistics.median(ours)
            report.add("decode time over bandwidth floor", ours_s / floor_s, "<=", 1.4)


def concurrency(rig: Rig, scale: Scale, report: Report) -> None:
    """Decode throughput of 4 and 8 at once, and end to end with prompts of 450 tokens."""
    rates: dict[int, list[float]] = {1: [], 4: [], 8: []}
    gains: dict[int, list[float]] = {tokens: [] for tokens in ANSWERS}
    for _ in range(scale.rounds):
        for requests, found in rates.items():
            found.append(rig.throughput(requests, SHORT_CONTEXT, scale.tokens))
        for tokens, found in gains.items():
            prompts = [rig.ids(450) for _ in range(4)]
            alone_s = sum(_duration_s(rig, [ids], tokens) for ids in prompts)
            found.append(alone_s / _duration_s(rig, prompts, tokens))
    for requests, found in rates.items():
        report.add(f"decode tokens/s, {requests} at once", statistics.median(found))
    for requests, bound in ((4, 2.5), (8, 3.3)):
        gain = statistics.median(b / a for a, b in zip(rates[1], rates[requests], strict=True))
        report.add(f"decode gain of {requests} at once", gain, ">=", bound)
    for tokens, found in gains.items():
        name = f"end-to-end gain of 4 at once, prompts of 450, answers of {tokens}"
        report.add(name, statistics.median(found), ">=" if tokens == max(ANSWERS) else "", 1.9)


def prefill(rig: Rig, scale: Scale, report: Report) -> None:
    """Time to the first token of a cold prompt against a stock forward over it."""
    for length, bound in PREFILLS.items():
        ours, theirs = [], []
        for _ in range(scale.rounds):
            ids = rig.ids(length)
            ours.append(rig.ask(ids, 1).wait().ttft_s)
            theirs.append(aside(partial(stock_prefill_s, rig.stock, ids)))
        report.add(f"prefill ms, {length} tokens", statistics.median(ours) * 1e3)
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        report.add(f"prefill speedup over stock, {length} tokens", ratio, ">=", bound)


def overhead(rig: Rig, scale: Scale, report: Report) -> None:
    """From submission to the first forward, with and without a search in the store."""
    for length in (20, 450):
        for reuse in (ReuseMode.OFF, ReuseMode.EXACT):
            waits = []
            for _ in range(2 * scale.rounds):
                rig.settle()
                stats = rig.ask(rig.ids(length), 1, reuse=reuse).wait().events[-1].stats
                if stats is not None:
                    waits.append(stats.queue_ms + stats.load_ms)
            name = f"admission to first forward ms, {length} tokens, reuse {reuse.value}"
            report.add(name, statistics.median(waits), "<=", 3.0)


def reuse(rig: Rig, scale: Scale, report: Report) -> None:
    """A prompt whose KV is in RAM: time to first token, and what is left beside one step."""
    gains, beside = [], []
    for _ in range(scale.rounds):
        ids = rig.ids(1000)
        cold = rig.ask(ids, 8, reuse=ReuseMode.EXACT).wait()
        warm = rig.ask(ids, 8, reuse=ReuseMode.EXACT).wait()
        gains.append(cold.ttft_s / warm.ttft_s)
        beside.append(warm.ttft_s - statistics.median(warm.gaps_s))
    report.add("time to first token gain from RAM, 1000 tokens", statistics.median(gains))
    report.add("RAM hit beyond one step, ms", statistics.median(beside) * 1e3)


def verification(rig: Rig, scale: Scale, report: Report) -> None:
    """A step over 5 and 9 rows of one sequence against one row, at the runner."""
    runner = rig.loaded.runner
    buffer = KvBuffer(torch.zeros(runner.layout.shape(256)))
    ids = rig.ids(SHORT_CONTEXT + 16)
    times: dict[int, list[float]] = {1: [], 5: [], 9: []}

    def measure() -> None:
        _forward_s(rig, buffer, ids[:SHORT_CONTEXT], 0)
        for _ in range(4 * scale.rounds):
            for rows, found in times.items():
                found.append(_forward_s(rig, buffer, ids[SHORT_CONTEXT:][:rows], SHORT_CONTEXT))

    aside(measure)
    for rows, bound in ((5, 1.65), (9, 1.85)):
        cost = statistics.median(times[rows]) / statistics.median(times[1])
        report.add(f"verification of {rows - 1} drafts over one step", cost, "<=", bound)


def admission_gap(rig: Rig, scale: Scale, report: Report) -> None:
    """A running stream's worst gap while a prompt of 4k tokens comes in, and that prompt's TTFT."""
    gaps, ttfts = [], []
    for _ in range(scale.rounds):
        alone_s = rig.ask(rig.ids(4000), 1).wait().ttft_s
        stream = rig.ask(rig.ids(SHORT_CONTEXT), 3000)
        _wait_for(stream, 24)
        before = statistics.median(stream.gaps_s[4:])
        began = len(stream.times_s)
        prompt = rig.ask(rig.ids(4000), 1).wait()
        gaps.append(max(stream.gaps_s[began - 1 :]) / before)
        ttfts.append(prompt.ttft_s / alone_s)
        rig.cancel(stream)
    report.add("worst gap over median gap during a 4k prompt", statistics.median(gaps), "<=", 4.0)
    report.add("TTFT of that prompt over alone", statistics.median(ttfts), "<=", 1.8)


def soak(rig: Rig, scale: Scale, report: Report) -> None:
    """Mixed requests, some cancelled; memory does not grow in the second half.

    The RAM tier is small, so that it is full long before that: what grows then is a leak, or memory
    that the evicted left in pieces.
    """
    rig.renew(SOAK_RAM_BYTES)
    rng = random.Random(1)
    began_s, sizes = time.perf_counter(), []
    open_answers: list[Answer] = []
    for number in range(scale.soak_requests):
        sampling = SamplingParams(temperature=rng.choice([0.0, 0.8]), top_p=0.9, seed=number)
        length, tokens = rng.choice([5, 40, 130]), rng.randrange(1, 6)
        reuse_mode = rng.choice([ReuseMode.EXACT, ReuseMode.EXACT, ReuseMode.OFF])
        open_answers.append(rig.ask(rig.ids(length), tokens, reuse=reuse_mode, sampling=sampling))
        if len(open_answers) == 8:
            answer = open_answers.pop(0)
            answer.first.wait()
            if rng.random() < 0.1:
                rig.cancel(answer)
            answer.done.wait()
        if number % 50 == 49:
            sizes.append(resident_mib())
    for answer in open_answers:
        answer.wait()
    rig.settle()
    report.add("soak: requests/s", scale.soak_requests / (time.perf_counter() - began_s))
    report.add("soak: KV bytes leased afterwards", rig.engine.stats().kv_leased_bytes, "<=", 0)
    if len(sizes) > 3:
        growth = sizes[-1] - sizes[len(sizes) // 2]
        report.add("soak: growth in the second half, MiB", growth, "<=", 64)


MEASUREMENTS: dict[str, Measurement] = {
    "decode": decode,
    "concurrency": concurrency,
    "prefill": prefill,
    "overhead": overhead,
    "reuse": reuse,
    "verification": verification,
    "gap": admission_gap,
    "guard": guard,
    "service": service,
    "soak": soak,
}


def _duration_s(rig: Rig, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    began_s = time.perf_counter()
    for answer in [rig.ask(ids, tokens) for ids in prompts]:
        answer.wait()
    return time.perf_counter() - began_s


def _forward_s(rig: Rig, buffer: KvBuffer, ids: Sequence[int], start: int) -> float:
    rows = len(ids)
    span = Span(buffer, 0, rows, start, start + rows - 1)
    positions = torch.arange(start, start + rows)
    step = Step(torch.tensor(ids), positions, (span,), torch.arange(min(rows, 16)))
    began_s = time.perf_counter()
    rig.loaded.runner.forward(step)
    return time.perf_counter() - began_s


def _wait_for(answer: Answer, tokens: int) -> None:
    answer.first.wait()
    while len(answer.times_s) < tokens:
        answer.done.wait(0.01)


def _text_ids(folder: Path, options: Options) -> list[int]:
    tokenizer = load_tokenizer(str(folder))

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    corpus = load_corpus(1, 30 if options.short else 60, 450, count_tokens=count)
    text = "\n\n".join(corpus.sets[0].documents)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    shift = random.Random(options.seed).randrange(len(ids))
    return ids[shift:] + ids[:shift]


def _extra() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", default="smollm2", help="name or folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(MEASUREMENTS)}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
