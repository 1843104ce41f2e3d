"""A run's traces against its promises: the ledger's windows, foresight, hindsight."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rakv_cluster.speculation.cost_model import CostTable
from rakv_cluster.speculation.decision import Reason
from rakv_cluster.speculation.drafters import SuffixDrafter
from rakv_cluster.speculation.report import StepTrace

WINDOW_TOKENS = 1_000
MAX_DRAFTS = 15


@dataclass(frozen=True, slots=True)
class Booked:
    """What the ledger holds of one step: tokens, its time, and that of plain steps instead."""

    tokens: int
    spent_ms: float
    plain_ms: float

    @classmethod
    def of(cls, step: StepTrace) -> Booked:
        """As the controller books it (ADR 0070): a plain step costs its base by definition."""
        drafted = Reason(step.reason).drafts
        spent_ms = step.measured_ms if drafted else step.base_ms
        return cls(
            step.accepted + 1,
            spent_ms + step.control_ms,
            step.base_ms * (step.accepted + 1),
        )


def overspend(steps: Sequence[Booked], prefill_ms: float = 0.0) -> float:
    """Share of plain time, ``prefill_ms`` included, that was lost; negative if time was saved."""
    plain_ms = sum(step.plain_ms for step in steps)
    spent_ms = sum(step.spent_ms for step in steps)
    return (spent_ms - plain_ms) / (plain_ms + prefill_ms) if plain_ms else 0.0


def worst_window(steps: Sequence[Booked]) -> float:
    """Largest overspend over any run of steps that just emits :data:`WINDOW_TOKENS` tokens.

    Over all steps where there are fewer tokens.
    """
    tokens = [0, *accumulate(step.tokens for step in steps)]
    spent = [0.0, *accumulate(step.spent_ms for step in steps)]
    plain = [0.0, *accumulate(step.plain_ms for step in steps)]
    worst = -math.inf
    for first in range(len(steps)):
        last = bisect_left(tokens, tokens[first] + WINDOW_TOKENS)
        if last <= len(steps):
            worst = max(worst, (spent[last] - spent[first]) / (plain[last] - plain[first]) - 1)
    return worst if math.isfinite(worst) else overspend(steps)


@dataclass(frozen=True, slots=True)
class Foresight:
    """Time for one text by the cost table, in plain steps' time.

    ``oracle`` knows before each step how many drafts will be right; ``fixed`` always takes so
    many drafts if there are as many.
    """

    plain_ms: float
    oracle_ms: float
    fixed_ms: dict[int, float]


def foresee(
    prompt_ids: Sequence[int], output_ids: Sequence[int], table: CostTable, arms: Sequence[int]
) -> Foresight:
    """What the suffix drafter could have brought on this text, by ``table``'s costs.

    The first output token comes with the prefill; guesses are free.
    """
    right, available = _guesses(prompt_ids, output_ids)
    context = len(prompt_ids) + len(output_ids) // 2
    costs = table.step_costs(batch=1, context_tokens=context)
    count = len(right)
    best = [0.0] * (count + 1)
    for at in range(count - 1, -1, -1):
        # A step with r drafts right is cheapest with just r of them.
        best[at] = min(costs.at(1 + taken) + best[at + 1 + taken] for taken in range(right[at] + 1))
    fixed = {}
    for arm in arms:
        at, ms = 0, 0.0
        while at < count:
            drafts = min(arm, available[at])
            ms += costs.at(1 + drafts)
            at += 1 + min(drafts, right[at])
        fixed[arm] = ms
    return Foresight(costs.at(1) * count, best[0], fixed)


def _guesses(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """At each output token behind the first: drafts that would be right, and guessed at all."""
    drafter = SuffixDrafter()
    drafter.extend(prompt_ids)
    right, available = [], []
    for at in range(1, len(output_ids)):
        drafter.extend(output_ids[at - 1 : at])
        guess = drafter.propose(min(MAX_DRAFTS, len(output_ids) - at - 1)).token_ids
        matches = 0
        while matches < len(guess) and guess[matches] == output_ids[at + matches]:
            matches += 1
        right.append(matches)
        available.append(len(guess))
    return right, available
