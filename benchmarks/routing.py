"""Routing rules compared in virtual time, on recorded traces, over load and store speed.

    python -m benchmarks.routing [--short] [--requests N] [--seeds N] [--jobs N] [--plots DIR]
        [--json F] [--check]

Eight replicas that compute a token in 0.1 ms serve the first requests of the Mooncake conversation
trace, at recorded times, and whole coding-agent sessions, whose requests wait for the answers they
contain; "store 2x" loads KV twice as fast as it is computed, from disk, and a little slower from
another node. Load is the trace's speed or the number of sessions at once; one of 1 takes about all
time of the replicas. What is measured is the router and the caches it steers: see
:mod:`rakv_cluster.testing.simulated_worker` for what the replicas' model leaves out. Runs over the
agents' sessions differ by some 6% with when they begin, so that the median of five is off by 3%,
which is all that may be lost (ADR 0107): what is printed is the median of fifteen, each beside the
best of the others in the same run. About 40 minutes of one core. Without the recorded traces
(``$RAKV_SHARED``), questions about documents of Zipf popularity take their place, and the report
says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Options, Requirement, finish, parse_options, shared_data, table
from benchmarks.routing_micro import decision_us, simulated_decisions_per_s
from benchmarks.routing_rules import PEERS
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.testing.simulated_cluster import (
    ClusterSettings,
    Outcome,
    Rule,
    SimulatedCluster,
    ours,
)
from rakv_cluster.testing.simulated_worker import Hardware
from rakv_cluster.testing.traces import (
    DocumentLoad,
    TraceRequest,
    agent_sessions,
    document_questions,
    mooncake,
)

REPLICAS = 8
PREFILL_MS = 0.1
SLO_TTFT_MS = 5000.0
LOADS = {"low": 0.5, "medium": 0.85, "overload": 1.5}
STORES = {"2x": 2.0, "10x": 10.0}
# Of the 20 sessions: so many take all time of the replicas, each where its KV is.
AGENT_COPIES = 16
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace at one speed over one store."""

    trace: str
    load: str
    store: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One run; ``imbalance`` is the busiest replica's prefill time over the mean."""

    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    e2e_p50_ms: float
    e2e_p90_ms: float
    e2e_p99_ms: float
    hit_rate: float
    goodput: float
    imbalance: float


Results = dict[str, Summary]
"""By rule, of one run."""


def hardware(store: str) -> Hardware:
    """Replicas over a store that loads so many times faster than it is computed."""
    disk_ms = PREFILL_MS / STORES[store]
    return Hardware(prefill_ms=PREFILL_MS, disk_ms=disk_ms, remote_ms=1.2 * disk_ms)


def requests_of(scenario: Scenario, count: int, seed: int) -> list[TraceRequest]:
    """The scenario's requests: ``count``, or whole sessions in proportion to load and ``count``."""
    speed, traces = LOADS[scenario.load], shared_data() / "traces"
    if scenario.trace == "mooncake":
        recorded = traces / "mooncake_conversation.jsonl"
        if recorded.exists():
            return list(mooncake(recorded, speed=speed, requests=count))
    elif (traces / "agent_miniswe").exists():
        copies = max(round(speed * AGENT_COPIES * count / 4000), 1)
        return agent_sessions(traces / "agent_miniswe", copies=copies, seed=seed)
    load = DocumentLoad(rate_per_s=12 * speed, requests=count, document_tokens=8192)
    return list(document_questions(load, seed))


def run(
    trace: Sequence[TraceRequest], settings: ClusterSettings, seed: int, rule: Rule
) -> tuple[list[Outcome], list[float]]:
    """Outcomes, and each replica's ms of prefill."""
    cluster = SimulatedCluster(settings, seed, rule)
    return cluster.run(trace), [worker.busy_ms for worker in cluster.workers]


def summarize(outcomes: Sequence[Outcome], busy_ms: Sequence[float]) -> Summary:
    """The figures of a run."""
    ttft = np.asarray([outcome.ttft_ms for outcome in outcomes])
    e2e = np.asarray([outcome.e2e_ms for outcome in outcomes])
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    return Summary(
        *(float(np.percentile(ttft, q)) for q in (50, 90, 99)),
        *(float(np.percentile(e2e, q)) for q in (50, 90, 99)),
        hit_rate=sum(outcome.reused_tokens for outcome in outcomes) / prompt,
        goodput=float((ttft <= SLO_TTFT_MS).mean()),
        imbalance=max(busy_ms) / (sum(busy_ms) / len(busy_ms)),
    )


def compare(scenario: Scenario, count: int, seed: int) -> Results:
    """All rules on one scenario."""
    trace = requests_of(scenario, count, seed)
    settings = ClusterSettings(replicas=REPLICAS, hardware=(hardware(scenario.store),))
    blind = replace(settings, speculation_reported=False)
    results = {
        name: summarize(*run(trace, settings, seed, make(seed))) for name, make in PEERS.items()
    }
    results[OURS] = summarize(*run(trace, settings, seed, ours))
    results["ours, no speculation"] = summarize(*run(trace, blind, seed, ours))
    return results


def requirements_of(name: str, store: str, load: str, runs: Sequence[Results]) -> list[Requirement]:
    """What the router must show on one scenario, against the best of the others at each figure.

    The median over ``runs``, each beside the best of the others in that run.
    """
    needed = []
    for figure in ("ttft_p50_ms", "ttft_p90_ms"):
        ratios = [
            getattr(run[OURS], figure) / min(getattr(run[rule], figure) for rule in PEERS)
            for run in runs
        ]
        ratio = statistics.median(ratios)
        needed.append(Requirement(f"{name}: {figure} over the best other's", ratio, "<=", 1.03))
    gain = statistics.median(
        run["least loaded"].ttft_p50_ms / run[OURS].ttft_p50_ms for run in runs
    )
    if STORES[store] < 3:
        bound = 2.5 if load == "overload" else 1.25
        needed.append(Requirement(f"{name}: least loaded's p50 over ours", gain, ">=", bound))
    return needed


def medians(runs: Sequence[Results]) -> Results:
    """Each figure's median over the runs."""
    return {
        rule: Summary(
            *(
                statistics.median(getattr(run[rule], each.name) for run in runs)
                for each in fields(Summary)
            )
        )
        for rule in runs[0]
    }


def speculation_gain(requests: int, seed: int) -> float:
    """Mean end-to-end without the speculation term over that with it, on mixed work.

    Half the replicas draft well on copy work and badly on chat, half have faster plain steps.
    """
    drafting = Hardware(
        steps=StepCosts((1, 2, 4, 8, 16), (20.0, 20.5, 22.0, 26.0, 36.0)),
        acceptance={"copy": 0.9, "chat": 0.1},
    )
    plain = Hardware(steps=StepCosts((1,), (14.0,)))
    load = DocumentLoad(
        rate_per_s=4.0, requests=requests, documents=100, document_tokens=2048,
        output_tokens=200, kinds=("copy", "chat"),
    )  # fmt: skip
    trace = list(document_questions(load, seed))
    known = ClusterSettings(replicas=REPLICAS, hardware=(drafting, plain))
    blind = replace(known, speculation_reported=False)
    mean_ms = [
        float(np.mean([o.e2e_ms for o in run(trace, settings, seed, ours)[0]]))
        for settings in (known, blind)
    ]
    return mean_ms[1] / mean_ms[0]


def plot(folder: Path, results: Mapping[str, Mapping[str, Summary]]) -> None:
    """One picture per trace: median and 90th percentile TTFT of each rule, by scenario."""
    import matplotlib as mpl  # noqa: PLC0415  # only who wants pictures needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # only who wants pictures needs it

    folder.mkdir(parents=True, exist_ok=True)
    for trace in sorted({name.split(", ")[0] for name in results}):
        chosen = {name: rules for name, rules in results.items() if name.startswith(trace)}
        figure, axes = plt.subplots(1, len(chosen), figsize=(3.2 * len(chosen), 3.6))
        for axis, (name, rules) in zip(np.atleast_1d(axes), chosen.items(), strict=True):
            names = list(rules)
            axis.barh(names, [rules[rule].ttft_p90_ms for rule in names], color="lightgray")
            axis.barh(names, [rules[rule].ttft_p50_ms for rule in names], color="steelblue")
            axis.set_title(name.removeprefix(f"{trace}, "), fontsize=9)
            axis.set_xlabel("TTFT ms: p50, p90", fontsize=8)
            axis.set_xscale("log")
            axis.tick_params(labelsize=7, labelleft=axis is np.atleast_1d(axes)[0])
        figure.tight_layout()
        figure.savefig(folder / f"routing_{trace}.png", dpi=110)
        plt.close(figure)


def show(name: str, results: Mapping[str, Summary]) -> None:
    """A scenario's table."""
    rows = [
        (
            rule, s.ttft_p50_ms / 1e3, s.ttft_p90_ms / 1e3, s.ttft_p99_ms / 1e3,
            s.e2e_p50_ms / 1e3, s.e2e_p90_ms / 1e3, s.hit_rate, s.goodput, s.imbalance,
        )
        for rule, s in results.items()
    ]  # fmt: skip
    headings = (
        name, "ttft p50 s", "p90", "p99", "e2e p50 s", "p90", "hit rate", "goodput", "imbalance",
    )  # fmt: skip
    print(table(rows, headings), end="\n\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--requests", type=int, default=4000, help="per run")
    extra.add_argument("--seeds", type=int, default=15, help="runs of each scenario of the agents")
    extra.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs at once: their time is virtual"
    )
    extra.add_argument("--plots", type=Path, metavar="DIR", help="write pictures there")
    options, names = parse_options(str(__doc__), argv, extra=extra)
    count = min(names.requests, 800) if options.short else names.requests
    seeds = 1 if options.short else names.seeds
    runs, needed = _scenarios(options, count, seeds, names.jobs)
    gain = speculation_gain(300 if options.short else 1000, options.seed)
    needed.append(Requirement("mixed work: e2e without speculation term", gain, ">=", 1.05))
    micro = {replicas: decision_us(replicas, chunks=64) for replicas in (16, 1000)}
    rates = {replicas: simulated_decisions_per_s(replicas, options.short) for replicas in micro}
    needed += [
        Requirement("us per decision, 16 replicas, 64 chunks", micro[16], "<=", 200),
        Requirement("us per decision, 1000 replicas, 64 chunks", micro[1000], "<=", 2000),
        Requirement("simulated decisions per s, 16 replicas", rates[16], ">=", 3000),
        Requirement("simulated decisions per s, 1000 replicas", rates[1000], ">=", 400),
    ]
    if names.plots is not None:
        plot(names.plots, {name: medians(each) for name, each in runs.items()})
    report: dict[str, Any] = {
        "requests": count,
        "recorded_traces": (shared_data() / "traces").exists(),
        "scenarios": {
            name: [{rule: asdict(summary) for rule, summary in run.items()} for run in each]
            for name, each in runs.items()
        },
        "speculation_gain": gain,
        "decision_us": micro,
        "simulated_decisions_per_s": rates,
    }
    return finish(options, report, needed)


def _scenarios(
    options: Options, count: int, seeds: int, jobs: int
) -> tuple[dict[str, list[Results]], list[Requirement]]:
    """Every scenario's runs: one of the conversations, whose arrivals are recorded, and of the
    agents, whose sessions begin at random, one for each seed."""
    found: dict[str, list[Results]] = {}
    needed: list[Requirement] = []
    with ProcessPoolExecutor(jobs) as executor:
        asked = {
            Scenario(trace, load, store): [
                executor.submit(compare, Scenario(trace, load, store), count, options.seed + repeat)
                for repeat in range(repeats)
            ]
            for trace, repeats in (("mooncake", 1), ("agents", seeds))
            for load in LOADS
            for store in STORES
        }
        for scenario, futures in asked.items():
            name = f"{scenario.trace}, {scenario.load}, store {scenario.store}"
            found[name] = [future.result() for future in futures]
            show(name, medians(found[name]))
            needed += requirements_of(name, scenario.store, scenario.load, found[name])
    return found, needed


if __name__ == "__main__":
    sys.exit(main())
