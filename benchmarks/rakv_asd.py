"""Adaptive speculation with draft models: does it ever lose, what does it gain, is it right?

    python -m benchmarks.rakv_asd [--runs N] [--short] [--json F] [--check] [--seed N]
        [--pairs smollm2:self,smollm2:6] [--distill MINUTES] [--texts DIR] [--threads 2]
        [--cpu-time]

The paper's comparison. A pair ``MODEL:N`` is a model and the draft model made of its every N-th
layer (made once, into the cache folder); nothing is drafted from the text. A pair ``MODEL:self``
is a model that drafts for itself, from the text and by its own weights in four bits. One *block*
serves one prompt by all policies: no cache, cache with K=0, 1, 2, 4, 8 drafts on every step, and
adaptive. A machine's speed changes within seconds, so adaptive's neighbours are its likely best
rivals, K=0 and K=2; each block begins with another policy, every other seven run backwards. Before
a block every engine computes the prompt once, without drafts, and that is not counted. Prompts and
outputs of several lengths; times are of whole requests, the first ones of a new replica too.

Adaptive is compared with another policy by the geometric mean of the paired ratios: of two equal
policies on a noisy machine the arithmetic mean of A/B is above 1, and so is that of B/A.

``--runs`` counts requests, all policies together. Each block is appended to ``F.blocks.jsonl``
when it is done, so that a run which was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.paired import bootstrap, geometric_mean
from benchmarks.rakv_asd_pairs import SELF, Pair, model_and_draft, new_drafter
from benchmarks.speculation_arms import CpuClock, Policy, Run, SpeculationRig
from benchmarks.speculation_tasks import Task, load_tasks
from benchmarks.speculation_texts import origin
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.speculation.draft_rounds import ModelDrafter
from rakv_cluster.speculation.drafters import NullDrafter, SuffixDrafter
from rakv_cluster.speculation.report import break_even
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.types import ReuseMode

NO_CACHE, REUSE = "no cache", "reuse K=0"
ADAPTIVE = "adaptive"
FIXED = (1, 2, 4, 8)
POLICIES = (NO_CACHE, "K=8", "K=1", REUSE, ADAPTIVE, "K=2", "K=4")
PROMPT_TOKENS = (64, 256, 768)
OUTPUT_TOKENS = (32, 96)
SHORT_OUTPUT_TOKENS = (16, 32)
LARGEST_RATIO = 1.02


@dataclass(frozen=True, slots=True)
class Block:
    """One prompt served by every policy; ``recipe`` names the options that change its figures."""

    recipe: str
    pair: str
    prompt_tokens: int
    output_limit: int
    index: int
    total_ms: dict[str, float]
    output_tokens: int
    equal: bool
    accepted_share: dict[str, float]
    adaptive_drafting_share: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    pairs = [Pair(model, draft, names.distill) for model, draft in names.pairs]
    runs = names.runs or (4 * len(POLICIES) if options.short else 3600)
    per_pair = max(runs // len(POLICIES) // len(pairs), 1)
    recipe = (
        f"seed {options.seed} {'short' * options.short} {'cpu' * names.cpu_time} "
        f"threads {names.threads} distilled {names.distill} {names.texts} {len(POLICIES)} policies"
    )
    journal = Journal(options.json_path, recipe)
    print(f"prompts: {origin()}")
    results: dict[str, Any] = {}
    requirements: list[Requirement] = []
    for index, pair in enumerate(pairs):
        bench = PairBench(pair, names, options)
        left = (len(pairs) - index) * per_pair - journal.count(pair)
        blocks = bench.measure(journal, per_pair, left)
        results[pair.name] = summary = bench.summary(blocks, options)
        bench.close()
        requirements += _requirements(pair, summary)
    return finish(options, results, requirements)


class Journal:
    """Blocks that are done, one a line; without a report's path, in memory only.

    Blocks of another ``recipe`` stay in the file and do not count. A line that a kill cut short
    is dropped.
    """

    def __init__(self, json_path: Path | None, recipe: str) -> None:
        self.recipe = recipe
        self._path = None if json_path is None else Path(f"{json_path}.blocks.jsonl")
        self._blocks: list[Block] = []
        if self._path is not None and self._path.exists():
            *lines, torn = self._path.read_text().split("\n")
            if torn:
                self._path.write_text("".join(f"{line}\n" for line in lines))
            found = [Block(**json.loads(line)) for line in lines]
            self._blocks = [block for block in found if block.recipe == recipe]

    def add(self, block: Block) -> None:
        """Keep a block; on disk before this returns."""
        self._blocks.append(block)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(block)) + "\n")

    def of(self, pair: Pair) -> list[Block]:
        """A pair's blocks so far."""
        return [block for block in self._blocks if block.pair == pair.name]

    def count(self, pair: Pair) -> int:
        """How many there are."""
        return len(self.of(pair))


class PairBench:
    """One pair's models and engines."""

    def __init__(self, pair: Pair, names: argparse.Namespace, options: Options) -> None:
        cache_dir = load_settings().cache_path
        source = resolve(pair.model, cache_dir)
        self.pair = pair
        self._short = options.short
        threads = 1 if names.cpu_time else names.threads
        clock = CpuClock() if names.cpu_time else SystemClock()
        # Costs of its own: measured now, and by this run's clock.
        self._costs_dir = tempfile.TemporaryDirectory()
        self._rig = SpeculationRig(
            Path(source), threads=threads, cache_dir=Path(self._costs_dir.name), clock=clock
        )
        drafter = new_drafter(
            pair,
            self._rig,
            source=source,
            cache_dir=cache_dir,
            texts=names.texts,
            threads=threads,
        )
        self._drafter = drafter()
        self._forced = self._policy("forced", self._drafter)
        self._adaptive = self._policy(ADAPTIVE, drafter())
        self._tasks = load_tasks(
            self._rig.loaded.tokenizer, 20, output_tokens=max(OUTPUT_TOKENS), seed=options.seed,
            categories=("summarization", "rag", "qa", "math_reasoning", "chat"), longest=10_000,
        )  # fmt: skip

    def close(self) -> None:
        """End the engines."""
        self._rig.close()
        self._costs_dir.cleanup()

    def _policy(self, name: str, drafter: ModelDrafter) -> Policy:
        text = SuffixDrafter if self.pair.draft == SELF else NullDrafter
        speculator = Speculator(
            self._rig.costs(), ControllerSettings(), self._rig.clock, text, drafter
        )
        return self._rig.start(name, speculator)

    def measure(self, journal: Journal, blocks: int, left: int) -> list[Block]:
        """Blocks up to ``blocks``; says once how long all that are ``left`` will take."""
        began_s, first = time.perf_counter(), journal.count(self.pair)
        for index in range(first, blocks):
            journal.add(self._block(index, journal.recipe))
            done = index + 1 - first
            if done in (1, 4) or done % 50 == 0:
                hours = (time.perf_counter() - began_s) / done * (left - done) / 3600
                print(f"... {self.pair.name}: block {index + 1}, {hours:.2f} h to go", flush=True)
        return journal.of(self.pair)

    def _block(self, index: int, recipe: str) -> Block:
        """The ``index``-th prompt by every policy; each block starts with another one."""
        size = PROMPT_TOKENS[index % len(PROMPT_TOKENS)]
        lengths = SHORT_OUTPUT_TOKENS if self._short else OUTPUT_TOKENS
        limit = lengths[index // len(PROMPT_TOKENS) % len(lengths)]
        ids = self._prompt(index, size)
        task = Task("asd", f"{self.pair.name} {index}", ids, limit)
        for engine in (self._forced, self._adaptive):
            self._rig.serve(engine, Task("asd", "warm-up", ids, 1), "off")
        start = index % len(POLICIES)
        runs: dict[str, Run] = {}
        order = (*POLICIES[start:], *POLICIES[:start])
        for policy in order if index // len(POLICIES) % 2 == 0 else reversed(order):
            reuse = ReuseMode.OFF if policy == NO_CACHE else ReuseMode.EXACT
            engine = self._adaptive if policy == ADAPTIVE else self._forced
            runs[policy] = self._rig.serve(engine, task, _mode(policy), reuse=reuse)
        adaptive = runs[ADAPTIVE].stats.steps_by_drafts
        drafting = sum(steps for drafts, steps in adaptive.items() if drafts)
        return Block(
            recipe=recipe,
            pair=self.pair.name,
            prompt_tokens=size,
            output_limit=limit,
            index=index,
            total_ms={policy: run.total_s * 1e3 for policy, run in runs.items()},
            output_tokens=len(runs[REUSE].token_ids),
            equal=len({run.token_ids for run in runs.values()}) == 1,
            accepted_share={policy: _accepted(run) for policy, run in runs.items()},
            adaptive_drafting_share=drafting / max(sum(adaptive.values()), 1),
        )

    def _prompt(self, index: int, size: int) -> tuple[int, ...]:
        """``size`` tokens that end as a prompt of the data does; filled from others before it."""
        ids: tuple[int, ...] = ()
        while len(ids) < size:
            ids = self._tasks[index % len(self._tasks)].ids + ids
            index += 1
        return ids[-size:]

    def summary(self, blocks: Sequence[Block], options: Options) -> dict[str, Any]:
        """Tables and figures of one pair."""
        totals = {policy: _mean_ms(blocks, policy) for policy in POLICIES}
        others = [policy for policy in POLICIES if policy != ADAPTIVE]
        best = min(others, key=totals.__getitem__)
        against = {
            policy: bootstrap(
                [b.total_ms[ADAPTIVE] / b.total_ms[policy] for b in blocks],
                geometric_mean,
                seed=options.seed,
            )
            for policy in others
        }
        lines = [
            (
                policy,
                totals[policy],
                totals[policy] / totals[REUSE],
                _share(blocks, policy),
                *(
                    (each.value, each.low, each.high)
                    if (each := against.get(policy))
                    else ("",) * 3
                ),
            )
            for policy in POLICIES
        ]
        print(f"{self.pair.name}: {len(blocks)} blocks")
        headings = ("policy", "ms", "/ reuse K=0", "accepted", "adaptive / it", "low", "high")
        print(table(lines, headings))
        found = {
            "blocks": len(blocks),
            "mean total ms": totals,
            "best other policy": best,
            "adaptive / others": {name: asdict(each) for name, each in against.items()},
            "latency reduction against K=4": 1 - totals[ADAPTIVE] / totals["K=4"],
            "latency reduction against reuse K=0": 1 - totals[ADAPTIVE] / totals[REUSE],
            "throughput gain over K=4": totals["K=4"] / totals[ADAPTIVE] - 1,
            "throughput gain over reuse K=0": totals[REUSE] / totals[ADAPTIVE] - 1,
            "break-even acceptance": self._break_even(),
            "decision accuracy": _decision_accuracy(blocks),
            "outputs equal": float(np.mean([block.equal for block in blocks])),
            "expected agreement": self._drafter.agreement,
        }
        for name, value in found.items():
            if isinstance(value, float):
                print(f"  {name}: {value:.4f}")
        print(f"  break-even acceptance: {found['break-even acceptance']}")
        return found

    def _break_even(self) -> dict[str, float]:
        """Constant acceptance at which K drafts of the draft model pay, by the measured costs."""
        costs: StepCosts = self._adaptive.speculator.table.step_costs(batch=1, context_tokens=512)
        round_ms = self._drafter.round_ms
        return {
            f"K={drafts}": break_even(
                drafts, (costs.at(1 + drafts) + drafts * round_ms) / costs.at(1)
            )
            for drafts in FIXED
        }


def _mode(policy: str) -> SpeculationMode:
    modes: dict[str, SpeculationMode] = {
        NO_CACHE: "off", REUSE: "off", "K=1": "1", "K=2": "2", "K=4": "4", "K=8": "8",
        ADAPTIVE: "auto",
    }  # fmt: skip
    return modes[policy]


def _accepted(run: Run) -> float:
    drafted = sum(block.drafted * block.steps for block in run.stats.blocks)
    return run.stats.accepted_tokens / drafted if drafted else 0.0


def _mean_ms(blocks: Sequence[Block], policy: str) -> float:
    return float(np.mean([block.total_ms[policy] for block in blocks]))


def _share(blocks: Sequence[Block], policy: str) -> float:
    return float(np.mean([block.accepted_share[policy] for block in blocks]))


def _decision_accuracy(blocks: Sequence[Block]) -> float:
    """Share of (prompt length, output limit) cells in which adaptive mostly drafted just where
    the best fixed K beats K=0 in the mean."""
    cells: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        cells.setdefault((block.prompt_tokens, block.output_limit), []).append(block)
    right = []
    for mine in cells.values():
        pays = min(_mean_ms(mine, f"K={drafts}") for drafts in FIXED) < _mean_ms(mine, REUSE)
        drafts = statistics.mean(block.adaptive_drafting_share for block in mine) > 0.5
        right.append(pays == drafts)
    return float(np.mean(right))


def _requirements(pair: Pair, summary: dict[str, Any]) -> list[Requirement]:
    best = summary["adaptive / others"][summary["best other policy"]]
    return [
        Requirement(
            f"{pair.name}: adaptive / best other policy, 95% upper bound",
            best["high"],
            "<=",
            LARGEST_RATIO,
        ),
        Requirement(f"{pair.name}: outputs equal", summary["outputs equal"], ">=", 1.0),
    ]


def _extra() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs", type=int, default=0, help="requests; 0: 3600, or 32 if short")
    parser.add_argument(
        "--pairs",
        type=model_and_draft,
        default="smollm2:self,smollm2:6",
        help="MODEL:N or MODEL:self, ...",
    )
    parser.add_argument("--distill", type=float, default=0.0, help="minutes, for every pair")
    parser.add_argument("--texts", type=Path, default=Path(), help="to distill on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure and decide by CPU time of one thread: for a machine with other load",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
