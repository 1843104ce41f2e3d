"""What a step costs: fused decoder (uniform and fast numerics), generic path, stock transformers.

    python -m benchmarks.runner [--short] [--json F] [--model M] [--threads N] [--cpu-time]

No engine, no store: the forward alone, arms interleaved in one process, median and minimum of
the rounds. ``decode``: one token behind a context, beside ``transformers`` ``generate``; the
bandwidth floor is the weights' bytes (plus the context's KV) over the read rate of this run.
``rows``: steps of T rows of one sequence (verification of T - 1 drafts). ``batch``: one row of each
of N sequences. ``prefill``: a whole prompt, beside the stock forward. Other load on the machine
makes wall times meaningless (the header has the load average): ``--cpu-time`` measures one thread
by its own clock, which stands still while others have the core; ratios then leave out how well
two threads share the work.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.common import Options, Requirement, finish, parse_options, table
from rakv_cluster.config import load_settings
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import measure_costs, plan_rows, usable_kernels
from rakv_cluster.model.selection import ChosenRunner, KernelOptions, choose_runner
from rakv_cluster.model.step import Runner, Span, Step

SHORT_CONTEXT, LONG_CONTEXT = 128, 1758
NEW_TOKENS = 8

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of the rounds of one arm."""

    median_ms: float
    min_ms: float


@dataclass(frozen=True, slots=True)
class Bench:
    """A clock in seconds and a number of rounds."""

    clock: Callable[[], float]
    rounds: int

    def timed(self, work: Work) -> float:
        """Seconds that ``work`` takes."""
        started = self.clock()
        work()
        return self.clock() - started

    def interleaved(self, arms: Mapping[str, Work], scale: float = 1.0) -> dict[str, Times]:
        """Every arm once per round, after one that does not count; times over ``scale``."""
        seen: dict[str, list[float]] = {name: [] for name in arms}
        for index in range(self.rounds + 1):
            for name, work in arms.items():
                elapsed = self.timed(work) * 1e3 / scale
                if index:
                    seen[name].append(elapsed)
        return {name: Times(statistics.median(ms), min(ms)) for name, ms in seen.items()}

    def read_rate_gb_s(self, megabytes: int = 256) -> float:
        """Fastest rate of reading memory that does not fit the cache, in 1e9 bytes per second."""
        values = torch.ones(megabytes << 18)
        best = min(self.timed(values.sum) for _ in range(12))
        return values.numel() * 4 / best / 1e9


@dataclass(frozen=True, slots=True)
class Subjects:
    """Stock model and runners by arm, over separate copies of the weights."""

    stock: PreTrainedModel
    runners: Mapping[str, Runner]
    uniform: ChosenRunner
    fast_rows: str

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step must read: every weight but the embedding's other rows."""
        assert isinstance(self.uniform.runner, FusedLlamaRunner)
        return sum(linear.nbytes for linear in self.uniform.runner.weights.linears)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the tables, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    torch.set_num_threads(1 if names.cpu_time else names.threads)
    torch.manual_seed(options.seed)
    bench = Bench(
        time.thread_time if names.cpu_time else time.perf_counter, 3 if options.short else 7
    )
    subjects = _load(resolve(names.model, load_settings().cache_path))
    read_gb_s = bench.read_rate_gb_s()
    print(f"kernels: {subjects.uniform.kernels}; fast rows: {subjects.fast_rows}")
    print(f"numerics: spread {subjects.uniform.numerics.spread:.3g}; read {read_gb_s:.1f} GB/s")
    contexts = (SHORT_CONTEXT,) if options.short else (SHORT_CONTEXT, LONG_CONTEXT)
    results: dict[str, Any] = {"read_gb_s": read_gb_s, "fast_rows": subjects.fast_rows}
    results["decode"] = {c: _decode(subjects, bench, c) for c in contexts}
    results["rows"] = {c: _rows(subjects, bench, c) for c in contexts}
    results["batch"] = _batch(subjects, bench)
    lengths = (512,) if options.short else (1024, 2048, 4096)
    few = replace(bench, rounds=min(bench.rounds, 5))
    results["prefill"] = {n: _prefill(subjects, few, n) for n in lengths}
    return _report(options, subjects, results)


def _extra() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", default="smollm2", help="name, id or folder (Llama type)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its own clock")
    return parser


def _load(source: str) -> Subjects:
    def fresh() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    stock = fresh()
    context = stock.config.max_position_embeddings
    generic = choose_runner(fresh(), context_tokens=context, options=KernelOptions(fused="off"))
    uniform = choose_runner(fresh(), context_tokens=context, options=KernelOptions(fused="on"))
    assert isinstance(uniform.runner, FusedLlamaRunner)
    weights = uniform.runner.weights
    with torch.inference_mode():
        kernels = usable_kernels(weights.layers[0].gate_up)
        layers = [layer.linears for layer in weights.layers]
        rows = plan_rows(measure_costs(layers, weights.head, kernels))
    runners = {
        "uniform": uniform.runner,
        "fast": FusedLlamaRunner(weights, rows=rows),
        "generic": generic.runner,
    }
    return Subjects(stock, runners, uniform, str(rows))


def _buffer(runner: Runner, tokens: int) -> KvBuffer:
    capacity = -(-tokens // 256) * 256
    return KvBuffer(torch.randn(runner.layout.shape(capacity)))


def _step(runner: Runner, parts: Sequence[tuple[KvBuffer, int, int]], *, last_only: bool) -> Step:
    """A step of random tokens over (buffer, first position, rows) parts."""
    spans, positions, row = [], [], 0
    for buffer, first, rows in parts:
        spans.append(Span(buffer, row, row + rows, first, first + rows - 1))
        positions.append(torch.arange(first, first + rows))
        row += rows
    ids = torch.randint(5, runner.vocab_size, (row,))
    wanted = torch.tensor([row - 1]) if last_only else torch.arange(row)
    return Step(ids, torch.cat(positions), tuple(spans), wanted)


def _forward_arms(
    subjects: Subjects, parts: Sequence[tuple[int, int]], *, last_only: bool = False
) -> dict[str, Work]:
    """By runner, a forward over sequences with (context, rows)."""
    arms: dict[str, Work] = {}
    for name, runner in subjects.runners.items():
        buffers = [(_buffer(runner, first + rows), first, rows) for first, rows in parts]
        step = _step(runner, buffers, last_only=last_only)
        arms[name] = partial(runner.forward, step)
    return arms


def _decode(subjects: Subjects, bench: Bench, context: int) -> dict[str, Times]:
    """Milliseconds per token, ``NEW_TOKENS`` of them behind ``context``."""
    arms: dict[str, Work] = {}
    for name, forward in _forward_arms(subjects, [(context, 1)]).items():
        arms[name] = partial(_repeat, forward, NEW_TOKENS)
    ids = torch.randint(5, 1000, (1, context + 1))
    with torch.inference_mode():
        cache = DynamicCache(config=subjects.stock.config)
        subjects.stock(ids[:, :-1], cache=cache, logits_to_keep=1)

    def generate() -> object:
        return subjects.stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=copy.deepcopy(cache),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )

    arms["generate"] = generate
    return bench.interleaved(arms, scale=NEW_TOKENS)


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def _rows(subjects: Subjects, bench: Bench, context: int) -> dict[int, dict[str, Times]]:
    return {
        rows: bench.interleaved(_forward_arms(subjects, [(context, rows)]))
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17)
    }


def _batch(subjects: Subjects, bench: Bench) -> dict[int, dict[str, Times]]:
    return {
        count: bench.interleaved(_forward_arms(subjects, [(SHORT_CONTEXT, 1)] * count))
        for count in (1, 2, 4, 8)
    }


def _prefill(subjects: Subjects, bench: Bench, tokens: int) -> dict[str, Times]:
    arms = _forward_arms(subjects, [(0, tokens)], last_only=True)
    ids = torch.randint(5, 1000, (1, tokens))

    def stock() -> object:
        with torch.inference_mode():
            return subjects.stock(ids, use_cache=True, logits_to_keep=1)

    arms["stock"] = stock
    return bench.interleaved(arms)


def _report(options: Options, subjects: Subjects, results: dict[str, Any]) -> int:
    floor_ms = subjects.weight_bytes / results["read_gb_s"] / 1e6
    kv_bytes = subjects.uniform.runner.layout.bytes_per_token
    requirements = []
    for context, times in results["decode"].items():
        floor = floor_ms + context * kv_bytes / results["read_gb_s"] / 1e6
        print(f"\ndecode behind {context} tokens, ms per token (floor {floor:.1f})")
        print(_table({"": times}))
        stock = times["generate"].min_ms
        bound = 1.4 if context == SHORT_CONTEXT else 1.7
        for arm in ("uniform", "fast"):
            ratio = stock / times[arm].min_ms
            requirements.append(Requirement(f"{arm} decode at {context}", ratio, ">=", bound))
            if context == SHORT_CONTEXT:
                over = times[arm].min_ms / floor
                requirements.append(Requirement(f"{arm} decode over its floor", over, "<=", 1.4))
    for context, by_rows in results["rows"].items():
        print(f"\nsteps of T rows of one sequence behind {context} tokens, ms")
        print(_table(by_rows))
    print("\none row of each of N sequences, ms")
    print(_table(results["batch"]))
    print("\nprefill, ms")
    print(_table(results["prefill"]))
    requirements += _ratios(results)
    plain = {"decode", "rows", "batch", "prefill"}
    report = {key: _plain(value) if key in plain else value for key, value in results.items()}
    report["floor_ms"] = floor_ms
    return finish(options, report, requirements)


def _ratios(results: Mapping[str, Any]) -> list[Requirement]:
    """The issue's ratios from minima: verification, batching, prefill."""
    found = []
    for arm in ("uniform", "fast"):
        rows = {n: times[arm].min_ms for n, times in results["rows"][SHORT_CONTEXT].items()}
        batch = {n: times[arm].min_ms for n, times in results["batch"].items()}
        for drafts, bound in ((4, 1.65), (8, 1.85)):
            ratio = rows[drafts + 1] / rows[1]
            found.append(Requirement(f"{arm} verify K={drafts} over one token", ratio, "<=", bound))
        for count, bound in ((4, 2.5), (8, 3.3)):
            gain = count * batch[1] / batch[count]
            found.append(Requirement(f"{arm} {count} sequences over one", gain, ">=", bound))
        for tokens, times in results["prefill"].items():
            gain = times["stock"].min_ms / times[arm].min_ms
            bound = 1.1 if tokens >= 4096 else 1.0
            found.append(Requirement(f"{arm} prefill of {tokens}", gain, ">=", bound))
    return found


def _table(rows: Mapping[Any, Mapping[str, Times]]) -> str:
    arms = list(next(iter(rows.values())))
    cells = [
        [name, *(f"{times[arm].min_ms:.1f} / {times[arm].median_ms:.1f}" for arm in arms)]
        for name, times in rows.items()
    ]
    return table(cells, ["min / median", *arms])


def _plain(value: object) -> object:
    """Nested mappings with string keys, for JSON."""
    if isinstance(value, Times):
        return {"median_ms": value.median_ms, "min_ms": value.min_ms}
    assert isinstance(value, Mapping)
    return {str(key): _plain(inner) for key, inner in value.items()}


if __name__ == "__main__":
    raise SystemExit(main())
