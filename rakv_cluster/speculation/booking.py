"""What a step cost and brought, booked to the ledgers. Pure like the decision it follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rakv_cluster.speculation.controller import (
    Candidate,
    ControllerSettings,
    ReplicaState,
    RequestState,
)
from rakv_cluster.speculation.decision import Decision
from rakv_cluster.speculation.governor import charge

DRAFT_MS_GAIN_UP = 0.5
DRAFT_MS_GAIN_DOWN = 0.1
"""A drafter that becomes slow is believed soon, one that recovers with hesitation."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step turned out to take and bring; ``plain_steps`` per candidate, in order.

    ``making_ms`` is what a model's drafts took. ``draft_ms`` of guessing is 0 where the drafters
    were not asked; ``control_ms`` holds it and what deciding and learning took beside it. Behind a
    ``surprising`` time the next step is plain, to tell what changed.
    """

    forward_ms: float
    making_ms: float
    draft_ms: float
    control_ms: float
    plain_steps: tuple[int, ...]
    surprising: bool = False


def book_setup(replica: ReplicaState, request: RequestState, ms: float) -> None:
    """Book what it took to get a request's drafter ready."""
    replica.ledger.book(plain_ms=0.0, overspend_ms=ms, tokens=0)
    request.ledger.overspend_ms += ms


def settle(
    settings: ControllerSettings,
    replica: ReplicaState,
    candidates: Sequence[Candidate],
    decision: Decision,
    result: StepResult,
) -> None:
    """Book a step's cost to the ledgers. Acceptance is scored by each request's tracker.

    A plain step costs what K=0 costs by definition, plus what speculation itself took; forced
    requests are neither charged nor protected.
    """
    drafting = decision.reason.drafts
    asked_model = any(c.by_model and n for c, n in zip(candidates, decision.drafts, strict=True))
    replica.unprobed_steps = 0 if asked_model else replica.unprobed_steps + 1
    if drafting:
        replica.drafting_steps += 1
    elif decision.rows == len(candidates):
        replica.drafting_steps = 0
    if result.surprising:
        replica.drafting_steps = settings.baseline_interval
    if result.draft_ms > 0:
        replica.draft_ms = replica.draft_ms or result.draft_ms
        rise_ms = result.draft_ms - replica.draft_ms
        replica.draft_ms += rise_ms * (DRAFT_MS_GAIN_UP if rise_ms > 0 else DRAFT_MS_GAIN_DOWN)
    free = [index for index, candidate in enumerate(candidates) if candidate.forced < 0]
    if not free or math.isinf(decision.base_ms):
        return
    spent_ms = decision.base_ms
    if drafting:
        took_ms = result.making_ms + result.forward_ms
        spent_ms = min(took_ms, settings.stall_factor * decision.predicted_ms)
    charge(
        settings.governor,
        replica.ledger,
        [candidates[index].state.ledger for index in free],
        base_ms=decision.base_ms,
        spent_ms=spent_ms + result.control_ms,
        plain_steps=[result.plain_steps[index] for index in free],
    )
