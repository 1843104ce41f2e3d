"""What reuse outside prefixes costs in fidelity and gains in time to the first token.

Fidelity: documents whose KV was computed in another order, repaired by several selectors at
several fractions, against full recompute on the same prompts: all arms from identical donors, with
bootstrap intervals over prompts. Layer-1 deviation is CacheBlend's measure; it is handed exact
layer-1 values here without paying for the check pass that computes them, which flatters it.

TTFT: one engine, documents in RAM and shuffled, arms interleaved in one run. Then on a disk slower
than computing, where loads are priced. The task: whether the answer is in what an arm writes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.fidelity_cases import (
    CHARACTERS_PER_TOKEN,
    FRACTIONS,
    MAIN_FRACTION,
    Figures,
    measure,
)
from benchmarks.fidelity_data import prompts, sources
from benchmarks.fidelity_report import (
    draw,
    equal_time_ratios,
    headline,
    points,
    print_front,
    report_cases,
    speeds_of,
)
from benchmarks.fidelity_task import report_tasks
from benchmarks.fidelity_throttled import throttled
from benchmarks.fidelity_ttft import ARMS, SLOW_ARMS, Times, TtftRig, over
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.model.threads import aside
from rakv_cluster.reuse.fidelity import FidelityPrompt
from rakv_cluster.store.memory import MemoryStore


def main() -> int:
    """Run everything and report."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="as `rakv serve --model` takes it")
    extra.add_argument("--data", type=Path, help="shared data sets (default: $RAKV_SHARED)")
    extra.add_argument("--cases", type=int, default=12, help="prompts of each source")
    extra.add_argument("--documents", type=int, default=6, help="documents of a prompt")
    extra.add_argument("--tokens", type=int, default=200, help="of a document, about")
    extra.add_argument("--ttft-tokens", type=int, default=4000, help="of the timed prompt, about")
    extra.add_argument("--ttft-documents", type=int, default=9, help="of the timed prompt")
    extra.add_argument(
        "--throttled-tokens", type=int, default=1000, help="of the prompt on a slow disk, about"
    )
    extra.add_argument("--rounds", type=int, default=5, help="of the timed arms")
    extra.add_argument(
        "--budget-s", type=float, default=720.0, help="no new case after this many seconds"
    )
    extra.add_argument("--only", choices=["fidelity", "ttft"], help="one of the two parts")
    extra.add_argument("--threads", type=int, default=2)
    extra.add_argument("--png", type=Path, help="write a picture of fidelity against speed")
    options, names = parse_options(__doc__ or "", extra=extra)
    if options.short:
        names.cases, names.documents, names.tokens = 2, 4, 120
        names.ttft_tokens, names.ttft_documents = 1000, 6
        names.throttled_tokens = 500
    torch.set_num_threads(names.threads)
    settings = load_settings({}, environ={})
    model = load_model(resolve(names.model, settings.cache_path), threads=names.threads)
    results: dict[str, Any] = {"model": model.card.model_id}
    requirements: list[Requirement] = []
    if names.only != "fidelity":
        times, results["ttft"], met = _ttft(model, names, options)
        results["throttled disk"], bounds = _throttled(model, names, options)
        requirements += met + bounds
    if names.only != "ttft":
        figures = _fidelity(model, names, options)
        speeds = {} if names.only else speeds_of(times, figures)
        results["fidelity"] = report_cases(figures, speeds)
        if figures.tasks:
            results["task"] = report_tasks(figures.tasks)
        worst = max(case.kl for case in figures.arms["all", 1.0])
        requirements.append(
            Requirement("KL where everything is repaired (nats)", worst, "<=", 1e-4)
        )
    if names.only is None:
        results["ratios"], met = equal_time_ratios(figures, times)
        requirements += met
        results["headline"] = headline(figures, times)
        found = points(figures, times)
        results["front"] = print_front(found)
        if names.png is not None:
            draw(found, names.png)
    return finish(options, results, requirements)


def _fidelity(model: LoadedModel, names: argparse.Namespace, options: Options) -> Figures:
    return measure(
        model,
        data=names.data,
        cases=names.cases,
        documents=names.documents,
        tokens=names.tokens,
        fractions=(MAIN_FRACTION,) if options.short else FRACTIONS,
        seed=options.seed,
        budget_s=names.budget_s,
    )


def _ttft(
    model: LoadedModel, names: argparse.Namespace, options: Options
) -> tuple[Times, dict[str, Any], list[Requirement]]:
    documents = names.ttft_documents
    prompt = _prompt(model, documents + 1, names.ttft_tokens // documents, options.seed)
    *cached, fresh = prompt.documents
    rig = TtftRig(
        model,
        replace(prompt, documents=tuple(cached)),
        fresh * (documents // 3),
        MemoryStore(4 << 30, SystemClock()),
        price_loads=False,
    )
    rng = np.random.default_rng(options.seed)
    try:
        rig.seed()
        timed = rig.time(ARMS, names.rounds, rng)
        for name, arm in rig.time(SLOW_ARMS, 2 * names.rounds, rng).items():
            timed[name].seconds += arm.seconds
        order_ms = rig.order_ms(rng)
    finally:
        rig.close()
    medians = {name: statistics.median(arm.seconds) for name, arm in timed.items()}
    # The engine's thread has ended: another one computes now.
    following_s = aside(lambda: rig.following_s(model.runner, model.rotation))
    times = Times(medians, model.card.layout.layers, following_s)
    # Those two differ by less than the machine's speed moves between rounds.
    speedups = times.speedups | {
        "prefix only": 1 / over(*(timed[arm.name] for arm in SLOW_ARMS[::-1]))
    }
    rows, report = [], {"order_ms": order_ms}
    for name, arm in timed.items():
        stats = arm.stats
        report[name] = {
            "seconds": arm.seconds, "speedup": speedups[name], "stats": asdict(stats)
        }  # fmt: skip
        kept = (stats.ram_tokens, stats.blended_tokens, stats.repaired_tokens)
        over_prefix = speedups[name] / speedups["prefix only"] if "front" not in name else "-"
        rows.append([name, stats.prompt_tokens, *kept, medians[name], speedups[name], over_prefix])
    headings = [
        "arm", "tokens", "exact", "blended", "repaired", "median s", "x no cache", "x prefix only",
    ]  # fmt: skip
    print(table(rows, headings))
    print(f"{names.rounds} rounds; finding the order takes an ingress {order_ms:.2f} ms")
    bounds = {
        "prefix only": 0.98, "reorder": 15.0, "blend 5%": 7.0, "blend 15%": 4.0,
        "blend 15%, probe": 3.4,
        "blend 5%, one new in front": 2.6, "blend 15%, one new in front": 2.1,
    }  # fmt: skip
    return (
        times,
        report,
        [
            Requirement(f"TTFT, {name}, times no cache", speedups[name], ">=", bound)
            for name, bound in bounds.items()
        ],
    )


def _throttled(
    model: LoadedModel, names: argparse.Namespace, options: Options
) -> tuple[dict[str, Any], list[Requirement]]:
    documents = 6
    prompt = _prompt(model, documents, names.throttled_tokens // documents, options.seed)
    return throttled(model, prompt, options.seed)


def _prompt(model: LoadedModel, documents: int, tokens: int, seed: int) -> FidelityPrompt:
    """A prompt of so many manual pages of so many tokens each."""
    manual = sources(documents, tokens * CHARACTERS_PER_TOKEN * 2)["manual pages"]
    (prompt,) = prompts(manual, 1, model.tokenizer, seed)
    return replace(prompt, documents=tuple(each[:tokens] for each in prompt.documents))


if __name__ == "__main__":
    sys.exit(main())
