"""How many drafts each sequence gets in the next step.

:func:`choose` is pure: it maps (hazards, ledgers, step costs) to a :class:`Decision` that says
what it expected and why. What came of it is booked by :mod:`rakv_cluster.speculation.booking`.
Neither reads a clock.

A step's extra rows are shared out by chance of survival: the best use of R rows over all
sequences is the R likeliest drafts (a draft never survives its predecessor's rejection, so the
likeliest are always whole prefixes). Then R itself is the one that yields most tokens per ms for
the whole step (goodput, as in TurboSpec, arXiv:2406.14066), among those the governor allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.speculation.decision import Decision, Option, Reason
from rakv_cluster.speculation.governor import (
    GovernorSettings,
    ReplicaLedger,
    RequestLedger,
    allowance_ms,
)
from rakv_cluster.speculation.hazards import AcceptanceTracker, ReplicaHazards
from rakv_cluster.speculation.lengths import AnswerLengths


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """``margin`` is what drafting must promise over K=0. Of a model's drafts, which cost a forward
    each, no more than ``max_model_drafts`` are weighed.

    After ``baseline_interval`` drafting steps one plain step is taken, so that the cost of K=0,
    which everything is compared with, is never stale. A step's measured time is booked up to
    ``stall_factor`` times the predicted one: the rest is the machine's doing, or will be predicted
    the next time. Guessing is cheap up to ``cheap_draft_share`` of a plain step. A draft model
    that does not seem to pay is asked all the same where that costs no more than ``probe_share``
    of the plain time since the last that it made, if the governor allows: unlike free guesses, its
    drafts teach nothing unless they are paid for.
    """

    governor: GovernorSettings = field(default_factory=GovernorSettings)
    max_drafts: int = 15
    max_model_drafts: int = 8
    margin: float = 0.02
    baseline_interval: int = 64
    stall_factor: float = 1.5
    cheap_draft_share: float = 0.001
    probe_share: float = 0.005


@dataclass(slots=True)
class ReplicaState:
    """What a replica learns over all of its requests."""

    hazards: ReplicaHazards = field(default_factory=ReplicaHazards)
    ledger: ReplicaLedger = field(default_factory=ReplicaLedger)
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    draft_ms: float = 0.0
    drafting_steps: int = 0
    unprobed_steps: int = 0


@dataclass(slots=True)
class RequestState:
    """What is kept for one request while it runs."""

    acceptance: AcceptanceTracker
    ledger: RequestLedger

    @classmethod
    def begin(
        cls, replica: ReplicaState, *, prefill_ms: float, likely_decode_ms: float = 0.0
    ) -> RequestState:
        """State of a request whose prefill took so long; decoding will take ``likely_decode_ms`` at
        least, probably."""
        ledger = RequestLedger(plain_ms=prefill_ms, likely_ms=prefill_ms + likely_decode_ms)
        return cls(AcceptanceTracker(replica.hazards), ledger)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence of the step.

    ``available`` drafts can be had and used, guessed behind a match of ``match_tokens``.
    ``forced`` >= 0 takes the choice away: so many drafts, or all there are if fewer. Drafts
    ``by_model`` are yet to be made: they cost ``round_ms`` for each place in the block, however
    many sequences take part, and ``catch_up_ms`` before the first. A step that risks more than it
    must leaves ``spare_ms`` of what the request may lose: what a model's draft would take.
    """

    state: RequestState
    available: int
    match_tokens: int = 0
    forced: int = -1
    by_model: bool = False
    round_ms: float = 0.0
    catch_up_ms: float = 0.0
    spare_ms: float = 0.0


def may_draft(
    settings: ControllerSettings,
    replica: ReplicaState,
    requests: Sequence[RequestState],
    costs: StepCosts,
) -> bool:
    """Whether asking the drafters is itself affordable: a guess costs time even if unused."""
    batch = len(requests)
    base_ms = costs.at(batch)
    if math.isinf(base_ms):
        return True
    ledgers = [request.ledger for request in requests]
    allowed = allowance_ms(settings.governor, replica.ledger, ledgers, base_ms=base_ms, batch=batch)
    return asking_ms(settings, replica, costs, batch) <= allowed


def asking_ms(
    settings: ControllerSettings, replica: ReplicaState, costs: StepCosts, batch: int
) -> float:
    """What the governor must allow before the drafters are asked.

    A guess that costs next to nothing is worth making for what it teaches about acceptance; a dear
    one only where there is enough to use it.
    """
    base_ms = costs.at(batch)
    if replica.draft_ms <= settings.cheap_draft_share * base_ms:
        return replica.draft_ms
    return replica.draft_ms + costs.at(batch + 1) - base_ms


def choose(
    settings: ControllerSettings,
    replica: ReplicaState,
    candidates: Sequence[Candidate],
    costs: StepCosts,
    *,
    draft_ms: float = 0.0,
) -> Decision:
    """Pick every candidate's number of drafts; changes nothing.

    ``costs`` are for this batch at its mean context; ``draft_ms`` was spent on guessing already.
    """
    forced = [min(max(c.forced, 0), c.available) for c in candidates]
    batch = len(candidates)
    base_rows = batch + sum(forced)
    base_ms = costs.at(base_rows)
    free = [c for c in candidates if c.forced < 0]
    allowed_ms = math.inf
    if free and math.isfinite(base_ms):
        allowed_ms = allowance_ms(
            settings.governor,
            replica.ledger,
            [c.state.ledger for c in free],
            base_ms=base_ms,
            batch=batch,
        )
    slots = _slots(settings, candidates)
    base = Option(base_rows, base_ms, base_ms, float(batch), 0.0, True)
    reason, best = Reason.NO_DRAFT, base
    options: tuple[Option, ...] = (base,)
    if slots:
        reserve = settings.governor.reserve
        options = _options(slots, candidates, costs, base, allowed_ms - draft_ms, reserve=reserve)
        reason, best = _pick(settings, replica, options)
    if reason is Reason.NOT_WORTH and _probes(settings, replica, candidates, options):
        reason, best = Reason.PROBED, options[1]
    drafts = _shared_out(slots, forced, best.rows - base_rows)
    most, least_chance = [0] * batch, 0.0
    making = [
        c for c, n in zip(candidates, drafts, strict=True) if c.by_model and c.forced < 0 and n
    ]
    if making and reason is Reason.DRAFTED:
        furthest = max(option.rows for option in options if option.allowed)
        reached = _shared_out(slots, forced, furthest - base_rows)
        most = [
            n if c.by_model and c.forced < 0 else 0
            for c, n in zip(candidates, reached, strict=True)
        ]
        least_chance = _least_chance(best, making, slots)
    return Decision(
        drafts=tuple(drafts),
        most=tuple(most),
        least_chance=least_chance,
        reason=reason,
        rows=best.rows,
        base_ms=base_ms,
        predicted_ms=best.ms,
        expected_tokens=best.tokens,
        allowance_ms=allowed_ms,
        options=options,
    )


def promise(
    settings: ControllerSettings,
    replica: ReplicaState,
    candidate: Candidate,
    costs: StepCosts,
    batch: int,
) -> float:
    """Most tokens per ms that a step of ``batch`` sequences could bring by this one's drafts, as
    far as its request may go; 0 where no cost is known."""
    base_ms = costs.at(batch)
    if math.isinf(base_ms):
        return 0.0
    ledgers = [candidate.state.ledger]
    allowed_ms = allowance_ms(
        settings.governor, replica.ledger, ledgers, base_ms=base_ms, batch=batch
    )
    base = Option(batch, base_ms, base_ms, float(batch), 0.0, True)
    reserve = settings.governor.reserve
    slots = _slots(settings, (candidate,))
    options = _options(slots, (candidate,), costs, base, allowed_ms, reserve=reserve)
    return max(option.tokens / option.hoped_ms for option in options if option.allowed)


def _shared_out(slots: Sequence[tuple[float, int]], forced: Sequence[int], rows: int) -> list[int]:
    """Drafts per candidate if the best ``rows`` slots are filled."""
    drafts = list(forced)
    for _, index in slots[:rows]:
        drafts[index] += 1
    return drafts


def _least_chance(
    best: Option, making: Sequence[Candidate], slots: Sequence[tuple[float, int]]
) -> float:
    """The chance that all drafts so far are right from which on another round pays: by as much as
    a right draft brings, the time of the round brings elsewhere."""
    round_ms = max(candidate.round_ms for candidate in making)
    next_right = max(chance for chance, _ in slots)
    return round_ms * best.tokens / best.hoped_ms / (next_right * len(making))


def _slots(
    settings: ControllerSettings, candidates: Sequence[Candidate]
) -> list[tuple[float, int]]:
    """``(chance of acceptance, candidate)`` of every draft that could be taken, best first."""
    slots: list[tuple[float, int]] = []
    for index, candidate in enumerate(candidates):
        if candidate.forced >= 0 or candidate.available <= 0:
            continue
        count = min(candidate.available, settings.max_drafts)
        chances = candidate.state.acceptance.survivals(candidate.match_tokens, count)
        slots.extend((chance, index) for chance in chances)
    # Stable: of equal chances in one sequence, the earlier draft stays in front.
    slots.sort(key=lambda slot: -slot[0])
    return slots


def _options(
    slots: Sequence[tuple[float, int]],
    candidates: Sequence[Candidate],
    costs: StepCosts,
    base: Option,
    allowed_ms: float,
    *,
    reserve: float,
) -> tuple[Option, ...]:
    """K=0 first, then one option per rows bucket, each filled with the likeliest drafts, and one
    in front of every draft that takes a model another round: rows alone may be had for nothing.

    What is risked leaves enough to try once more with the least, so that one mistake at its start
    does not cost a request all of its drafts.
    """
    options = [base]
    tokens, taken, least_ms = base.tokens, 0, 0.0
    making = _Making(candidates)
    for edge, ms, hoped_ms in zip(costs.rows, costs.ms, costs.hoped_ms, strict=True):
        fill = min(edge - base.rows, len(slots))
        while taken < fill:
            chance, index = slots[taken]
            tokens += chance
            making.add(index)
            taken += 1
            if taken < fill and not making.lengthens(slots[taken][1]):
                continue
            extra_ms = (1 + reserve) * (ms + making.ms) - base.ms
            needed_ms = extra_ms + making.catch_up_ms + least_ms
            options.append(
                Option(
                    rows=base.rows + taken,
                    ms=ms + making.ms,
                    hoped_ms=hoped_ms + making.ms,
                    tokens=tokens,
                    needed_ms=needed_ms,
                    allowed=needed_ms <= allowed_ms,
                )
            )
            least_ms = least_ms or max(extra_ms, *(c.spare_ms for c in candidates))
    return tuple(options)


class _Making:
    """What a draft model takes to make the drafts added so far."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._places = [0] * len(candidates)
        self._rounds = 0
        self._round_ms = 0.0
        self.catch_up_ms = 0.0

    @property
    def ms(self) -> float:
        """One round per place in the longest block."""
        return self._rounds * self._round_ms

    def lengthens(self, index: int) -> bool:
        """Whether one more draft for this candidate takes another round."""
        return self._candidates[index].by_model and self._places[index] == self._rounds

    def add(self, index: int) -> None:
        """One more draft for this candidate."""
        candidate = self._candidates[index]
        if not candidate.by_model:
            return
        if self._places[index] == 0:
            self.catch_up_ms += candidate.catch_up_ms
        self._places[index] += 1
        self._rounds = max(self._rounds, self._places[index])
        self._round_ms = max(self._round_ms, candidate.round_ms)


def _pick(
    settings: ControllerSettings, replica: ReplicaState, options: Sequence[Option]
) -> tuple[Reason, Option]:
    base = options[0]
    if math.isinf(base.ms):
        return Reason.NO_COSTS, base
    least = (1 + settings.margin) * base.tokens / base.ms
    worth = [option for option in options[1:] if option.tokens / option.hoped_ms > least]
    if not worth:
        return Reason.NOT_WORTH, base
    allowed = [option for option in worth if option.allowed]
    if not allowed:
        return Reason.GOVERNED, base
    if replica.drafting_steps >= settings.baseline_interval:
        return Reason.BASELINE, base
    return Reason.DRAFTED, max(allowed, key=lambda option: option.tokens / option.hoped_ms)


def _probes(
    settings: ControllerSettings,
    replica: ReplicaState,
    candidates: Sequence[Candidate],
    options: Sequence[Option],
) -> bool:
    """Whether it is time for a draft model's drafts that are not expected to pay."""
    if len(options) < 2 or not options[1].allowed:
        return False
    catch_up_ms = sum(c.catch_up_ms for c in candidates if c.by_model)
    cost_ms = options[1].ms - options[0].ms + catch_up_ms
    affordable_ms = settings.probe_share * replica.unprobed_steps * options[0].ms
    return any(c.by_model for c in candidates) and cost_ms <= affordable_ms
