"""What reuse outside prefixes costs in fidelity and gains in time to the first token.

Fidelity: documents whose KV was computed in another order, repaired by several selectors at
several fractions, against full recompute on the same prompts: all arms from identical donors, with
bootstrap intervals over prompts. Layer-1 deviation is CacheBlend's measure; it is handed exact
layer-1 values here without paying for the check pass that computes them, which flatters it.

TTFT: one engine, documents in RAM and shuffled, arms interleaved in one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.fidelity_data import prompts, sources
from benchmarks.fidelity_ttft import TtftRig
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.reuse.calibrating import Interval, bootstrap, curve, mean_of
from rakv_cluster.reuse.calibration import Calibration
from rakv_cluster.reuse.fidelity import FidelityCase, FidelityPrompt, Measured
from rakv_cluster.reuse.selection import (
    Selector,
    at_random,
    everything,
    first_of_runs,
    most_deviating,
    most_sensitive,
    nothing,
)

FRACTIONS = (0.05, 0.15, 0.3, 0.45, 0.55)
SHORT_FRACTIONS = (0.15,)
SELECTORS: dict[str, Selector] = {
    "random": at_random(7),
    "first tokens": first_of_runs,
    "layer-1 deviation": most_deviating,
    "sensitivity": most_sensitive,
}
CHARACTERS_PER_TOKEN = 4

Key = tuple[str, float]
Figures = dict[Key, list[Measured]]


def main() -> int:
    """Run everything and report."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="as `rakv serve --model` takes it")
    extra.add_argument("--cases", type=int, default=8, help="prompts of each source")
    extra.add_argument("--documents", type=int, default=6, help="documents of a prompt")
    extra.add_argument("--tokens", type=int, default=200, help="of a document, about")
    extra.add_argument("--ttft-tokens", type=int, default=4000, help="of the timed prompt, about")
    extra.add_argument("--rounds", type=int, default=5, help="of the timed arms")
    extra.add_argument(
        "--budget-s", type=float, default=3600.0, help="no new case or round after this"
    )
    extra.add_argument("--only", choices=["fidelity", "ttft"], help="one of the two parts")
    extra.add_argument("--threads", type=int, default=2)
    extra.add_argument("--png", type=Path, help="write a picture of fidelity against speed")
    options, names = parse_options(__doc__ or "", extra=extra)
    if options.short:
        names.cases, names.documents, names.tokens = 2, 4, 120
        names.ttft_tokens, names.rounds = 1000, 3
    torch.set_num_threads(names.threads)
    settings = load_settings({}, environ={})
    model = load_model(resolve(names.model, settings.cache_path), threads=names.threads)
    results: dict[str, Any] = {"model": model.card.model_id}
    requirements: list[Requirement] = []
    if names.only != "ttft":
        figures = _fidelity(model, names, options)
        results["fidelity"], met = _report_fidelity(figures)
        requirements += met
    if names.only != "fidelity":
        results["ttft"], met = _ttft(model, names, options)
        requirements += met
    if names.png is not None and names.only is None:
        _draw(results, names.png)
    return finish(options, results, requirements)


def _fidelity(model: LoadedModel, names: argparse.Namespace, options: Options) -> Figures:
    """Cases of all sources in turn, until there are enough or the time is up."""
    figures: Figures = {}
    until_s = time.monotonic() + names.budget_s
    fractions = SHORT_FRACTIONS if options.short else FRACTIONS
    found = sources(names.documents, names.tokens * CHARACTERS_PER_TOKEN)
    cases = {
        source: prompts(asked, names.cases, model.tokenizer, options.seed)
        for source, asked in found.items()
    }
    for index in range(names.cases):
        for source, given in cases.items():
            if index >= len(given) or (time.monotonic() > until_s and figures):
                continue
            case = FidelityCase(
                model.runner, model.rotation, given[index], model.card.eos_token_ids
            )
            for key, measured in _measured(case, fractions).items():
                figures.setdefault(key, []).append(measured)
            print(f"{source}: case {index + 1}, {case.prompt_tokens} tokens", flush=True)
    return figures


def _measured(case: FidelityCase, fractions: Sequence[float]) -> dict[Key, Measured]:
    found = {("none", 0.0): case.measure(nothing, 0.0), ("all", 1.0): case.measure(everything, 1.0)}
    for fraction in fractions:
        for name, selector in SELECTORS.items():
            found[name, fraction] = case.measure(selector, fraction)
    return found


def _report_fidelity(figures: Figures) -> tuple[dict[str, Any], list[Requirement]]:
    rows, report = [], {}
    for (name, fraction), cases in figures.items():
        columns = {
            "kl": mean_of([case.kl for case in cases]),
            "first_kl": mean_of([case.first_kl for case in cases]),
            "top1": mean_of([case.top1 for case in cases]),
            "agreement": mean_of([case.agreement for case in cases]),
            "answer_logp_lost": mean_of([c.exact_answer_logp - c.answer_logp for c in cases]),
        }
        report[f"{name} {fraction:.0%}"] = {
            "cases": len(cases), **{key: asdict(value) for key, value in columns.items()}
        }  # fmt: skip
        rows.append([name, f"{fraction:.0%}", *map(_shown, columns.values())])
    headings = ["selector", "repaired", "KL", "KL first", "top-1", "greedy", "answer logp lost"]
    print(table(rows, headings))
    calibration = Calibration(
        points=curve({f: cases for (name, f), cases in figures.items() if name == "sensitivity"})
    )
    for budget in (0.05, 0.1, 0.2):
        choice = calibration.choose(budget)
        print(f"max_kl {budget}: {choice.refusal or f'repair {choice.fraction:.0%}'}")
    ratios = _ratios(figures)
    report["kl_ratios"] = {name: asdict(ratio) for name, ratio in ratios.items()}
    for name, ratio in ratios.items():
        print(f"{name}: {_shown(ratio)}")
    worst = max(case.kl for case in figures["all", 1.0])
    requirements = [
        Requirement("KL where everything is repaired (nats)", worst, "<=", 1e-4),
        *(
            Requirement(f"KL of {name} at 15%, without question probe", ratio.value, ">=", 1.2)
            for name, ratio in ratios.items()
            if "15%" in name
        ),
    ]
    return report, requirements


def _ratios(figures: Figures) -> dict[str, Interval]:
    """How many times the KL of a known selector is that of sensitivity, paired over prompts."""
    ratios = {}
    for (name, fraction), cases in figures.items():
        ours = figures.get(("sensitivity", fraction))
        if ours is None or name in {"sensitivity", "random"}:
            continue
        pairs = np.array([[one.kl, two.kl] for one, two in zip(cases, ours, strict=True)])
        index = list(range(len(pairs)))

        def ratio(drawn: Any, pairs: Any = pairs) -> Any:
            chosen = pairs[np.asarray(drawn, dtype=np.int64)].sum(-2)
            return chosen[..., 0] / chosen[..., 1]

        ratios[f"{name} / sensitivity, {fraction:.0%}"] = bootstrap(index, ratio)
    return ratios


def _ttft(
    model: LoadedModel, names: argparse.Namespace, options: Options
) -> tuple[dict[str, Any], list[Requirement]]:
    each = names.ttft_tokens // names.documents
    manual = sources(names.documents + 1, each * CHARACTERS_PER_TOKEN * 2)["manual pages"]
    (prompt,) = prompts(manual, 1, model.tokenizer, options.seed)
    trimmed = [document[:each] for document in prompt.documents]
    share = trimmed[-1] * (names.documents // 3)
    rig = TtftRig(model, _with_documents(prompt, trimmed[:-1]), share)
    rng = np.random.default_rng(options.seed)
    try:
        rig.seed()
        timed = rig.time(names.rounds, names.budget_s, rng)
        order_ms = rig.order_ms(rng)
    finally:
        rig.close()
    medians = {name: statistics.median(arm.seconds) for name, arm in timed.items()}
    rows, report = [], {"order_ms": order_ms}
    for name, arm in timed.items():
        base = "no cache, one new in front" if "in front" in name else "no cache"
        speedup = medians[base] / medians[name]
        stats = arm.stats
        report[name] = {"seconds": arm.seconds, "speedup": speedup, "stats": asdict(stats)}
        kept = (stats.ram_tokens, stats.blended_tokens, stats.repaired_tokens)
        rows.append([name, stats.prompt_tokens, *kept, medians[name], speedup])
    print(table(rows, ["arm", "tokens", "exact", "blended", "repaired", "median s", "x no cache"]))
    rounds = min(len(arm.seconds) for arm in timed.values())
    print(f"{rounds} rounds; finding the order takes an ingress {order_ms:.2f} ms")
    bounds = {
        "reorder": 15.0, "blend 5%": 7.0, "blend 15%": 4.0,
        "blend 5%, one new in front": 2.6, "blend 15%, one new in front": 2.1,
    }  # fmt: skip
    return report, [
        Requirement(f"TTFT, {name}, times no cache", report[name]["speedup"], ">=", bound)
        for name, bound in bounds.items()
    ]


def _with_documents(prompt: FidelityPrompt, documents: Sequence[tuple[int, ...]]) -> FidelityPrompt:
    return replace(prompt, documents=tuple(documents))


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _draw(results: dict[str, Any], path: Path) -> None:
    """KL against speed-up, a line per selector; fractions whose time was measured only."""
    from matplotlib import pyplot  # noqa: PLC0415  # the bench extra

    figure, axes = pyplot.subplots()
    for name in SELECTORS:
        points = []
        for fraction in FRACTIONS:
            timed = results["ttft"].get(f"blend {fraction:.0%}")
            measured = results["fidelity"].get(f"{name} {fraction:.0%}")
            if timed and measured:
                kl = measured["kl"]
                points.append((timed["speedup"], kl["value"], kl["low"], kl["high"]))
        if points:
            speed, value, low, high = map(np.array, zip(*points, strict=True))
            axes.errorbar(speed, value, (value - low, high - value), label=name, capsize=3)
    axes.set(xlabel="times no cache (TTFT)", ylabel="KL to full recompute (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
