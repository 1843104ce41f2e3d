"""Speculation on a real model: does adapting ever lose, and what does it gain?

    python -m benchmarks.speculation [--short] [--json F] [--check] [--seed N]
        [--prompts N] [--rounds N] [--budget-s S] [--categories edit,...] [--threads 2]
        [--arms K=4,strict] [--tokens N] [--cpu-time] [--model smollm2]

Arms K = 0, 1, 2, 4, 8, adaptive (default, strict, as the first request after a load, and with
drafts of the model's own weights in four bits where the text offers nothing) serve every prompt in
one run, interleaved. Times are from the first token to the last: the prompt's KV
is found in RAM by all arms alike. Ratios are taken per prompt; intervals are 95% bootstraps over
prompts. "edit" and "copy" are functions of real projects to change or to repeat.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.paired import Interval, bootstrap, median
from benchmarks.speculation_arms import Arm, CpuClock, Run, Served, SpeculationRig, serve_all
from benchmarks.speculation_ledger import Booked, foresee, overspend, worst_window
from benchmarks.speculation_tasks import CATEGORIES, CODE, Task, load_tasks
from benchmarks.speculation_texts import origin
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.speculation.governor import GovernorMode
from rakv_cluster.types import ReuseMode

FIXED = (1, 2, 4, 8)
PLAIN = "K=0"
ADAPTIVE, STRICT, FIRST, SELF = "adaptive", "strict", "first", "self-draft"
ARMS = (
    Arm("K=1", "1", "forced"),
    Arm("K=2", "2", "forced"),
    Arm("K=4", "4", "forced"),
    Arm("K=8", "8", "forced"),
    Arm(FIRST, "trace", FIRST, fresh=True),
    Arm(PLAIN, "off", "forced"),
    Arm(ADAPTIVE, "trace", ADAPTIVE),
    Arm(STRICT, "trace", STRICT, GovernorMode.STRICT),
    Arm(SELF, "trace", SELF, self_draft=True),
)
"""In the order of a round: what is compared with K=0 runs beside it, since a machine changes speed
within seconds."""
CODE_TOKENS = 128
"""Edit and copy tasks count from so many output tokens on."""
_HIT_TOKENS = 32


@dataclass(slots=True)
class Report:
    """Figures by name, and what they have to meet."""

    results: dict[str, Any] = field(default_factory=dict)
    requirements: list[Requirement] = field(default_factory=list)

    def at_most(self, name: str, value: float, bound: float) -> None:
        """A figure that must not exceed ``bound``."""
        self.results[name] = value
        self.requirements.append(Requirement(name, value, "<=", bound))

    def at_least(self, name: str, value: float, bound: float) -> None:
        """A figure that must reach ``bound``."""
        self.results[name] = value
        self.requirements.append(Requirement(name, value, ">=", bound))

    def note(self, name: str, value: float) -> None:
        """A figure without a bound."""
        self.results[name] = value


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    folder = Path(resolve(names.model, load_settings().cache_path))
    report = Report()
    report.results["texts"] = origin()
    print(f"prompts: {origin()}")
    with tempfile.TemporaryDirectory() as cache_dir:
        rig = SpeculationRig(
            folder,
            threads=1 if names.cpu_time else names.threads,
            cache_dir=Path(cache_dir),
            clock=CpuClock() if names.cpu_time else SystemClock(),
        )
        tasks = load_tasks(
            rig.loaded.tokenizer,
            names.prompts or (1 if options.short else 8),
            output_tokens=names.tokens or (48 if options.short else 128),
            seed=options.seed,
            categories=names.categories.split(","),
        )
        served = serve_all(
            rig, tasks, _arms(names.arms), rounds=names.rounds, budget_s=names.budget_s, note=_note
        )
        served = [one for one in served if len(one.runs[PLAIN][0].token_ids) > 1]
        times(served, report, options)
        ledgers(served, report)
        foresight(rig, served, report)
        cache_hits(rig, tasks, report, each=2 if options.short else 3)
        report.results["costs"] = _costs(rig)
        rig.close()
    report.results["requests"] = [_request(one) for one in served]
    shown = [(name, value) for name, value in report.results.items() if isinstance(value, float)]
    print(table(shown, ("figure", "value")))
    return finish(options, report.results, report.requirements)


def _arms(names: str) -> Sequence[Arm]:
    """All arms, or K=0, adaptive and the named ones."""
    wanted = {PLAIN, ADAPTIVE, *names.split(",")}
    return [arm for arm in ARMS if not names or arm.name in wanted]


def times(served: Sequence[Served], report: Report, options: Options) -> None:
    """Paired times by category and overall, and that every arm said the same."""
    lines = []
    for category in dict.fromkeys(one.task.category for one in served):
        mine = [one for one in served if one.task.category == category]
        ratio = _interval(mine, ADAPTIVE, options)
        report.at_most(f"{category}: time of adaptive / K=0, median", ratio.value, 1.01)
        report.at_most(f"{category}: its 95% upper bound", ratio.high, 1.03)
        speedups = [
            statistics.median(1 / one.ratio(arm, PLAIN) for one in mine) for arm in mine[0].runs
        ]
        lines.append((category, len(mine), _tokens(mine), *speedups))
    arms = list(served[0].runs)
    print(table(lines, ("speed-up", "n", "tokens", *arms)))
    overall = {arm: _total_s(served, PLAIN) / _total_s(served, arm) for arm in arms}
    report.results["speed-up overall by arm"] = overall
    print(table([("all", *overall.values())], ("total time", *overall)))
    report.at_least("speed-up overall, adaptive", overall[ADAPTIVE], 1.4)
    code = [
        one
        for one in served
        if one.task.category in CODE and len(one.runs[PLAIN][0].token_ids) >= CODE_TOKENS
    ]
    if code:
        speedup = _total_s(code, PLAIN) / _total_s(code, ADAPTIVE)
        report.at_least(f"speed-up on edit and copy of >= {CODE_TOKENS} tokens", speedup, 2.2)
    fixed = [overall[arm] for arm in arms if arm in {f"K={drafts}" for drafts in FIXED}]
    if fixed:
        gain = overall[ADAPTIVE] / max(fixed)
        report.at_least("adaptive over the best fixed K, overall", gain, 1.0)
    if STRICT in arms:
        report.at_least("speed-up overall, strict", overall[STRICT], 1.2)
    if FIRST in arms:
        first = _interval(served, FIRST, options)
        report.at_most("first request after load / K=0, median", first.value, 1.01)
        report.at_most("first request after load / K=0, 95% upper bound", first.high, 1.03)
    if SELF in arms:
        report.note("self-draft over adaptive, overall", overall[SELF] / overall[ADAPTIVE])
    equal = [
        run.token_ids == one.runs[PLAIN][0].token_ids
        for one in served
        for runs in one.runs.values()
        for run in runs
    ]
    report.at_least("share of outputs equal to K=0's", sum(equal) / len(equal), 1.0)


def ledgers(served: Sequence[Served], report: Report) -> None:
    """The ledger's bounds, and the ledger against the clock."""
    for arm, bound in ((ADAPTIVE, 0.05), (STRICT, 0.01), (SELF, 0.05)):
        if arm not in served[0].runs:
            continue
        shares = [
            overspend([Booked.of(step) for step in run.stats.trace], run.stats.prefill_ms)
            for one in served
            for run in one.runs[arm]
        ]
        report.at_most(f"{arm}: largest overspend of a request", max(shares), bound)
    booked = [
        Booked.of(step)
        for turn in range(len(served[0].runs[ADAPTIVE]))
        for one in served
        for step in one.runs[ADAPTIVE][turn].stats.trace
    ]
    report.at_most("adaptive: largest overspend over any 1,000 tokens", worst_window(booked), 0.01)
    claimed, clock = [], []
    for one in served:
        steps = [Booked.of(step) for step in one.runs[ADAPTIVE][0].stats.trace]
        if len(steps) >= 8:
            spent_ms = sum(step.spent_ms for step in steps)
            claimed.append(sum(step.plain_ms for step in steps) / (one.decode_s(PLAIN) * 1e3))
            clock.append(spent_ms / (one.runs[ADAPTIVE][0].decode_s * 1e3))
    report.note("ledger: plain time / measured K=0 time, median", statistics.median(claimed))
    report.note("ledger: its own time / measured time, median", statistics.median(clock))
    # A ledger whose plain time is too long would excuse losses.
    excused = statistics.median(a / b for a, b in zip(claimed, clock, strict=True))
    report.at_most("ledger: plain time it grants too much, ratio", excused, 1.03)
    control = [step.control_ms for one in served for step in one.runs[ADAPTIVE][0].stats.trace]
    base = [step.base_ms for one in served for step in one.runs[ADAPTIVE][0].stats.trace]
    report.note("speculation's own ms per step, median", statistics.median(control))
    report.note("... as a share of a plain step", sum(control) / sum(base))


def foresight(rig: SpeculationRig, served: Sequence[Served], report: Report) -> None:
    """By the measured costs: an oracle that knows the text, and what was missed against it."""
    costs = rig.policy(ADAPTIVE).speculator.table
    seen = [
        foresee(one.task.ids, one.runs[PLAIN][0].token_ids, costs, (*FIXED, 15)) for one in served
    ]
    plain_ms = sum(each.plain_ms for each in seen)
    oracle_ms = sum(each.oracle_ms for each in seen)
    ours_ms = sum(step.predicted_ms for one in served for step in one.runs[ADAPTIVE][0].stats.trace)
    report.note("by costs: speed-up of the foresight oracle", plain_ms / oracle_ms)
    report.note("by costs: speed-up of adaptive", plain_ms / ours_ms)
    for drafts in (*FIXED, 15):
        fixed_ms = sum(each.fixed_ms[drafts] for each in seen)
        report.note(f"by costs: speed-up of K={drafts}", plain_ms / fixed_ms)
    report.note("regret against foresight", 1 - oracle_ms / ours_ms)
    own = rig.policy(ADAPTIVE).speculator.report(context_tokens=512)
    report.note("regret against the best fixed K in hindsight", own.regret)
    report.note("decision accuracy (requests)", own.decision_accuracy)
    report.results["replica report"] = asdict(own)


def cache_hits(rig: SpeculationRig, tasks: Sequence[Task], report: Report, *, each: int) -> None:
    """End to end, in the default mode: a prompt whose KV is stored against one computed anew.

    So for the ``each`` shortest prompts, where there is least to gain, and as many of the longest;
    answers are short for the same reason. A prompt's ratio is the median of five pairs, each the
    other way round than the one before.
    """
    ordered = sorted(tasks, key=lambda task: len(task.ids))
    policy = rig.policy(ADAPTIVE)
    modes = [ReuseMode.EXACT, ReuseMode.OFF]
    ratios = []
    for whole in (*ordered[:each], *ordered[-each:]):
        task = replace(whole, max_tokens=_HIT_TOKENS)
        rig.serve(policy, task, "auto")  # stored from here on
        found = []
        for turn in range(5):
            runs = {
                mode: rig.serve(policy, task, "auto", reuse=mode)
                for mode in (modes if turn % 2 else reversed(modes))
            }
            found.append(runs[ReuseMode.EXACT].total_s / runs[ReuseMode.OFF].total_s)
        ratios.append((len(task.ids), statistics.median(found)))
    print(table(ratios, ("prompt tokens", "total time with a cache hit / without")))
    worst = max(ratio for _, ratio in ratios)
    report.at_most("total time with a cache hit / without, worst prompt", worst, 1.02)


def _interval(served: Sequence[Served], arm: str, options: Options) -> Interval:
    return bootstrap([one.ratio(arm, PLAIN) for one in served], median, seed=options.seed)


def _total_s(served: Sequence[Served], arm: str) -> float:
    return sum(one.decode_s(arm) for one in served)


def _tokens(served: Sequence[Served]) -> int:
    return sum(len(one.runs[PLAIN][0].token_ids) for one in served)


def _costs(rig: SpeculationRig) -> dict[str, dict[int, float]]:
    """ms by rows at two contexts, as the adaptive arm has learned them."""
    learned = rig.policy(ADAPTIVE).speculator.table
    found = {}
    for context in (256, 1024):
        costs = learned.step_costs(batch=1, context_tokens=context)
        found[f"context {context}"] = dict(zip(costs.rows, costs.ms, strict=True))
    return found


def _request(one: Served) -> dict[str, Any]:
    def arm(runs: Sequence[Run]) -> dict[str, Any]:
        return {
            "decode_s": [run.decode_s for run in runs],
            "steps_by_drafts": runs[0].stats.steps_by_drafts,
        }

    return {
        "category": one.task.category,
        "name": one.task.name,
        "prompt_tokens": len(one.task.ids),
        "output_tokens": len(one.runs[PLAIN][0].token_ids),
        "arms": {name: arm(runs) for name, runs in one.runs.items()},
    }


def _note(text: str) -> None:
    print(f"... {text}", flush=True)


def _extra() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--prompts", type=int, default=0, help="per category; 0: 8, or 1 if short")
    parser.add_argument("--rounds", type=int, default=1, help="of every arm on every prompt")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf, help="begin no prompt after so many seconds"
    )
    parser.add_argument("--categories", default=",".join(CATEGORIES))
    parser.add_argument("--arms", default="", help="K=4,strict,first: besides K=0 and adaptive")
    parser.add_argument("--tokens", type=int, default=0, help="longest answer; 0: 128, 48 if short")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure and decide by CPU time of one thread: for a machine with other load",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    return parser


if __name__ == "__main__":
    sys.exit(main())
