"""Fidelity of several selectors on identical donors, for benchmarks/fidelity.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.fidelity_data import prompts, sources
from benchmarks.fidelity_task import Task, tasks
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.reuse.calibrating import Interval, bootstrap, mean_of
from rakv_cluster.reuse.fidelity import FidelityCase, Measured
from rakv_cluster.reuse.probing import probe_settings
from rakv_cluster.reuse.selection import (
    Selector,
    at_random,
    default_selector,
    everything,
    first_of_runs,
    most_attended,
    most_deviating,
    most_sensitive,
    nothing,
    probed_selector,
)

FRACTIONS = (0.05, 0.15, 0.3)
MAIN_FRACTION = 0.15
PLAIN, PROBED = "importance, first and spread", "question probe"
"""The two selectors of the service."""

KNOWN = ("first tokens", "layer-1 deviation")
"""Selectors of others: EPIC's and CacheBlend's."""

SELECTORS: Mapping[str, Selector] = {
    "first tokens": first_of_runs,
    "layer-1 deviation": most_deviating,
    PLAIN: default_selector,
    PROBED: probed_selector,
}

CONTROLS: Mapping[str, tuple[Selector, bool]] = {
    "random": (at_random(7), False),
    "sensitivity": (most_sensitive, False),
    "attention": (most_attended, False),
    "random, followed": (at_random(7), True),
    "first tokens, followed": (first_of_runs, True),
    "layer-1 deviation, followed": (most_deviating, True),
}
"""Measured at the main fraction alone: a selector, and whether what is kept follows the repair."""
CHARACTERS_PER_TOKEN = 4

Arm = tuple[str, float]
"""A selector's name and the fraction that it repairs."""

WRITING: tuple[Arm, ...] = (
    ("none", 0.0),
    *((name, fraction) for name in (PLAIN, PROBED) for fraction in (0.05, MAIN_FRACTION)),
)
"""Arms that write an answer of their own, for the task's accuracy."""


@dataclass(slots=True)
class Figures:
    """What was measured, case by case: lists of all arms are parallel. ``tasks`` has the cases that
    have an answer."""

    sources: list[str] = field(default_factory=list)
    arms: dict[Arm, list[Measured]] = field(default_factory=dict)
    tasks: dict[str, list[Task]] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        """Number of prompts."""
        return len(self.sources)

    def mean(self, arm: Arm, figure: Callable[[Measured], float]) -> Interval:
        """Over all cases."""
        return mean_of([figure(case) for case in self.arms[arm]])

    def curve(self, name: str) -> dict[float, list[Measured]]:
        """One selector's cases by fraction; nothing repaired is everyone's start."""
        found = {fraction: cases for (each, fraction), cases in self.arms.items() if each == name}
        return {0.0: self.arms["none", 0.0], **found}

    def kl_at(self, name: str, fraction: float) -> np.ndarray:
        """Each case's KL at ``fraction``, linear between measured ones: ``[cases]``."""
        curve = self.curve(name)
        fractions = sorted(curve)
        kl = np.array([[case.kl for case in curve[each]] for each in fractions])
        return np.array([np.interp(fraction, fractions, column) for column in kl.T])


def measure(
    model: LoadedModel,
    *,
    data: Path | None,
    cases: int,
    documents: int,
    tokens: int,
    fractions: Sequence[float],
    seed: int,
    budget_s: float,
) -> Figures:
    """Cases of all sources in turn, until there are enough or the time is up."""
    until_s = time.monotonic() + budget_s
    figures = Figures()
    asked = {
        source: prompts(found, cases, model.tokenizer, seed)
        for source, found in sources(documents, tokens * CHARACTERS_PER_TOKEN, data).items()
    }
    probe = probe_settings(model.card.layout.layers)
    for index in range(cases):
        for source, given in asked.items():
            if index >= len(given) or (time.monotonic() > until_s and figures.cases):
                continue
            case = FidelityCase(
                model.runner, model.rotation, given[index], model.card.eos_token_ids, probe
            )
            arms = _measured(case, fractions)
            for arm, measured in arms.items():
                figures.arms.setdefault(arm, []).append(measured)
            figures.sources.append(source)
            if given[index].answer:
                for name, task in tasks(case, arms, given[index].answer, model.tokenizer).items():
                    figures.tasks.setdefault(name, []).append(task)
            print(f"{source}: case {index + 1}, {case.prompt_tokens} tokens", flush=True)
    return figures


def _measured(case: FidelityCase, fractions: Sequence[float]) -> dict[Arm, Measured]:
    """What is kept follows the repair of the service's selectors; others' leave it as it is."""
    found = {("none", 0.0): case.measure(nothing, 0.0, text=True)}
    for fraction in fractions:
        for name, selector in SELECTORS.items():
            writes = (name, fraction) in WRITING
            followed = name not in KNOWN
            found[name, fraction] = case.measure(selector, fraction, text=writes, follow=followed)
    for name, (selector, followed) in CONTROLS.items():
        found[name, MAIN_FRACTION] = case.measure(selector, MAIN_FRACTION, follow=followed)
    found["all", 1.0] = case.measure(everything, 1.0)
    return found


def ratio(ours: np.ndarray, theirs: np.ndarray) -> Interval:
    """How many times the KL of ``ours`` theirs is, over paired cases."""
    pairs = np.stack([theirs, ours], axis=-1)

    def of(drawn: np.ndarray) -> np.ndarray:
        sums = pairs[np.asarray(drawn, dtype=np.int64)].sum(-2)
        quotient: np.ndarray = sums[..., 0] / sums[..., 1]
        return quotient

    return bootstrap(list(range(len(pairs))), of)
