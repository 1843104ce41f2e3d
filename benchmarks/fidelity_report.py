"""Tables, ratios at equal time, Pareto front and picture of benchmarks/fidelity.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Requirement, table
from benchmarks.fidelity_cases import (
    CONTROLS,
    KNOWN,
    MAIN_FRACTION,
    PLAIN,
    PROBED,
    Arm,
    Figures,
    ratio,
)
from benchmarks.fidelity_task import FULL, difference, shown, verdict
from benchmarks.fidelity_ttft import Times
from rakv_cluster.reuse.calibrating import Interval, curve, mean_of
from rakv_cluster.reuse.calibration import Calibration, Choice
from rakv_cluster.reuse.fidelity import Measured

BUDGETS = (0.05, 0.1, 0.2)
DEFAULT_BUDGET = 0.1


@dataclass(frozen=True, slots=True)
class Point:
    """An arm's place in the picture: times no cache, and nats per token."""

    name: str
    speedup: float
    kl: Interval


def report_cases(figures: Figures, speeds: Mapping[Arm, tuple[float, float]]) -> dict[str, Any]:
    """Print a row for every arm, with its speed over no cache and over prefix reuse where that was
    measured; the same as data."""
    rows, report = [], {}
    for (name, fraction), cases in figures.arms.items():
        columns = {
            "kl": mean_of([case.kl for case in cases]),
            "first_kl": mean_of([case.first_kl for case in cases]),
            "top1": mean_of([case.top1 for case in cases]),
            "agreement": mean_of([case.agreement for case in cases]),
            "answer_logp_lost": _answer_lost(cases),
        }
        report[f"{name} {fraction:.0%}"] = {
            "cases": len(cases),
            "kl_by_case": [case.kl for case in cases],
            "times_no_cache_and_prefix": speeds.get((name, fraction), ()),
            **{key: asdict(value) for key, value in columns.items()},
        }
        rows.append(
            [
                name, f"{fraction:.0%}", *map(shown, columns.values()),
                " / ".join(f"{each:.1f}" for each in speeds.get((name, fraction), ())),
            ]
        )  # fmt: skip
    headings = [
        "selector", "repaired", "KL", "KL first", "top-1", "greedy", "answer logp lost",
        "x no cache / prefix",
    ]  # fmt: skip
    print(table(rows, headings))
    print(f"{figures.cases} prompts")
    return report


def equal_time_ratios(figures: Figures, times: Times) -> tuple[dict[str, Any], list[Requirement]]:
    """KL of known selectors over ours, where all of them have the time of :data:`MAIN_FRACTION`.

    Layer-1 deviation first computes a layer of everything, the probe runs the question twice; both
    are given that much less to repair. Others' selectors have no positions that follow the repair:
    what that takes, they may repair more. Between measured fractions KL is linear.
    """
    cost = {PLAIN: 0.0, PROBED: times.probe} | {name: _extra(times, name) for name in KNOWN}
    costs = {"check": times.check, "probe": times.probe, "following": times.following}
    print("costs as a share repaired:", ", ".join(f"{key} {x:.3f}" for key, x in costs.items()))
    report: dict[str, Any] = {f"{key}_cost": value for key, value in costs.items()}
    requirements = []
    for ours, bound in ((PLAIN, 1.2), (PROBED, 1.5)):
        mine = figures.kl_at(ours, MAIN_FRACTION - cost[ours])
        for known in KNOWN:
            found = ratio(mine, figures.kl_at(known, MAIN_FRACTION - cost[known]))
            name = f"KL of {known} / {ours} at equal TTFT ({MAIN_FRACTION:.0%})"
            print(f"{name}: {shown(found)}")
            report[name] = asdict(found)
            requirements.append(Requirement(name, found.value, ">=", bound))
    return report, requirements


def headline(figures: Figures, times: Times) -> dict[str, Any]:
    """Print what the default budget costs and brings, by these cases' own curve."""
    calibration = Calibration(
        points=curve(figures.curve(PLAIN)), probed=curve(figures.curve(PROBED))
    )
    for budget in BUDGETS:
        for probed in (False, True):
            choice = calibration.choose(budget, probed=probed)
            way = PROBED if probed else PLAIN
            print(f"max_kl {budget}, {way}: {choice.refusal or f'repair {choice.fraction:.0%}'}")
    choices = [calibration.choose(DEFAULT_BUDGET, probed=probed) for probed in (False, True)]
    met = [choice for choice in choices if not choice.refusal]
    if not met:
        print(f"headline: {choices[0].refusal}: computed exactly, at the speed of prefix reuse")
        return {"refusal": choices[0].refusal}
    choice = max(met, key=lambda each: _speed(times, each))
    name = (PROBED if choice.probed else PLAIN) if choice.fraction else "none"
    cases = figures.arms[name, choice.fraction]
    lost = _answer_lost(cases)
    top1 = mean_of([case.top1 - 1.0 for case in cases])
    speed = _speed(times, choice)
    over_prefix = speed / times.speedups["prefix only"]
    task = _task(figures, name, choice.fraction)
    print(
        f"headline: max_kl {DEFAULT_BUDGET} repairs {choice.fraction:.0%} ({name}): {speed:.1f}x no"
        f" cache, {over_prefix:.1f}x prefix reuse; gold answer logp {shown(lost)} lost, top-1 "
        f"{shown(top1)}; task accuracy above full recompute's {task}"
    )
    return {
        "fraction": choice.fraction, "selector": name, "speedup": speed,
        "over_prefix": over_prefix, "answer_logp_lost": asdict(lost), "top1": asdict(top1),
        "accuracy": task,
    }  # fmt: skip


def _task(figures: Figures, name: str, fraction: float) -> str:
    """How much more often that arm is right than full recompute, and whether that says anything."""
    mine, full = figures.tasks.get(f"{name} {fraction:.0%}"), figures.tasks.get(FULL)
    if not mine or not full:
        return "not measured"
    above = difference(mine, full)
    return f"{shown(above)}, non-inferior within 3 points: {verdict(above, len(mine))}"


def _answer_lost(cases: Sequence[Measured]) -> Interval:
    """Log-probability per token of the answers, over the cases that have one."""
    answered = [case for case in cases if case.exact_answer_logp]
    if not answered:
        return Interval(math.nan, math.nan, math.nan)
    return mean_of([case.exact_answer_logp - case.answer_logp for case in answered])


def _speed(times: Times, choice: Choice) -> float:
    return times.speedup(choice.fraction, extra=times.probe if choice.probed else 0.0)


def points(figures: Figures, times: Times) -> list[Point]:
    """Every arm's, exact ones too."""
    nothing = Interval(0.0, 0.0, 0.0)
    found = [Point(name, times.speedups[name], nothing) for name in ("no cache", "prefix only")]
    for name, fraction in figures.arms:
        if name == "all" or name in CONTROLS:
            continue
        kl = figures.mean((name, fraction), lambda case: case.kl)
        found.append(Point(_named((name, fraction)), speed_of(times, (name, fraction)), kl))
    return found


def speeds_of(times: Times, figures: Figures) -> dict[Arm, tuple[float, float]]:
    """Every arm's times no cache, and times prefix reuse."""
    speeds = {arm: speed_of(times, arm) for arm in figures.arms}
    prefix = times.speedups["prefix only"]
    return {arm: (speed, speed / prefix) for arm, speed in speeds.items()}


def speed_of(times: Times, arm: Arm) -> float:
    """Times no cache, with the selector's own work."""
    name, fraction = arm
    return times.speedup(fraction, extra=_extra(times, name) if fraction else 0.0)


def _extra(times: Times, name: str) -> float:
    """What the selector's own work takes as a share repaired, beside what the service's default
    takes: that has a following, which others do not have."""
    if name == PROBED:
        return times.probe
    check = times.check if name.startswith("layer-1 deviation") else 0.0
    return check - (times.following if name in KNOWN else 0.0)


def front(found: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both, by speed."""
    best: list[Point] = []
    for point in sorted(found, key=lambda each: (-each.speedup, each.kl.value)):
        if not best or point.kl.value < best[-1].kl.value:
            best.append(point)
    return best


def print_front(found: Sequence[Point]) -> list[str]:
    """The Pareto front, fastest first."""
    best = front(found)
    rows = [[point.name, f"{point.speedup:.1f}", shown(point.kl)] for point in best]
    print("Pareto front")
    print(table(rows, ["arm", "x no cache", "KL"]))
    return [point.name for point in best]


def draw(found: Sequence[Point], path: Path) -> None:
    """KL against speed-up, a line per selector."""
    from matplotlib import pyplot  # noqa: PLC0415  # the bench extra

    lines: defaultdict[str, list[Point]] = defaultdict(list)
    for point in found:
        lines[_line(point.name)].append(point)
    figure, axes = pyplot.subplots()
    for name, each in lines.items():
        speed = np.array([point.speedup for point in each])
        value, low, high = (
            np.array([getattr(point.kl, key) for point in each]) for key in ("value", "low", "high")
        )
        axes.errorbar(speed, value, (value - low, high - value), label=name, capsize=3, marker="o")
    axes.set(
        xlabel="times no cache (TTFT)", ylabel="KL to full recompute (nats per token)",
        xscale="log",
    )  # fmt: skip
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def _named(arm: Arm) -> str:
    name, fraction = arm
    return f"{name} {fraction:.0%}"


def _line(name: str) -> str:
    return name.rpartition(" ")[0] if name.endswith("%") else name
