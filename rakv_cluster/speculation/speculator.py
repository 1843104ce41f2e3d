"""The engine's view of speculation: a thin shell around drafters, cost table and controller.

Per decode step the engine calls :meth:`Speculator.plan`, runs one forward over the drafts it
returns, and reports back with :meth:`Speculator.settle`. What was really emitted is read from the
sequences themselves at the next plan, so steps in between need no bookkeeping. Used by the engine
thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from rakv_cluster.clock import Clock
from rakv_cluster.speculation.controller import (
    Candidate,
    ControllerSettings,
    Decision,
    ReplicaState,
    RequestState,
    StepResult,
    book_setup,
    choose,
    may_draft,
    settle,
)
from rakv_cluster.speculation.cost_model import ArmCosts, CostSample, CostTable, StepCosts
from rakv_cluster.speculation.drafters import NO_DRAFT, Draft, Drafter, NullDrafter, SuffixDrafter
from rakv_cluster.speculation.report import HindsightTally, ReplicaReport, arm_reports
from rakv_cluster.speculation.verification import Verdict

SpeculationMode = Literal["auto", "off", "1", "2", "4", "8"]
"""What a request may ask for: the controller's choice, none, or the paper's fixed arms."""

SPECULATION_MODES: tuple[SpeculationMode, ...] = get_args(SpeculationMode)


@dataclass(slots=True)
class Speculation:
    """One request's drafter and learned state; ``followed`` tokens are known to the drafter."""

    drafter: Drafter
    state: RequestState
    forced: int
    followed: int = 0
    tally: HindsightTally = field(default_factory=HindsightTally)


@dataclass(frozen=True, slots=True)
class Seat:
    """A sequence's place in the next step: all its tokens so far, and most drafts it can use.

    ``limit`` comes from :func:`rakv_cluster.speculation.verification.draft_limit`.
    """

    speculation: Speculation
    ids: np.ndarray
    limit: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Drafts per sequence for the next step, and why."""

    drafts: tuple[tuple[int, ...], ...]
    decision: Decision
    seats: tuple[Seat, ...]
    guesses: tuple[Draft, ...]
    candidates: tuple[Candidate, ...]
    costs: StepCosts
    context_tokens: int
    draft_ms: float


class Speculator:
    """A replica's speculation: learns from every request it sees."""

    def __init__(
        self,
        table: CostTable,
        settings: ControllerSettings,
        clock: Clock,
        new_drafter: Callable[[], Drafter] = SuffixDrafter,
    ) -> None:
        self.table = table
        self.replica = ReplicaState()
        self._settings = settings
        self._clock = clock
        self._new_drafter = new_drafter
        self._tally = HindsightTally()
        self._steps_by_reason: Counter[str] = Counter()
        self._steps_by_drafts: Counter[int] = Counter()
        self._requests = 0
        self._right = 0

    def begin(self, mode: SpeculationMode, ids: np.ndarray, *, prefill_ms: float) -> Speculation:
        """Follow a sequence from its first decode step on: call it when the first token is out.

        Its drafter reads the tokens so far (about 0.4 ms per 1,000), booked as overspend.
        """
        state = RequestState.begin(self.replica, prefill_ms=prefill_ms)
        if mode == "off":
            return Speculation(NullDrafter(), state, forced=0)
        forced = -1 if mode == "auto" else int(mode)
        speculation = Speculation(self._new_drafter(), state, forced)
        started_s = self._clock.monotonic_s()
        self._follow(speculation, ids)
        book_setup(self.replica, state, (self._clock.monotonic_s() - started_s) * 1e3)
        return speculation

    def plan(self, seats: Sequence[Seat]) -> StepPlan:
        """Drafts for a decode step over these sequences."""
        started_s = self._clock.monotonic_s()
        context_tokens = sum(len(seat.ids) for seat in seats) // len(seats)
        costs = self.table.step_costs(batch=len(seats), context_tokens=context_tokens)
        guesses = self._guesses(seats, costs)
        candidates = tuple(
            Candidate(
                seat.speculation.state,
                len(guess.token_ids),
                guess.match_tokens,
                seat.speculation.forced,
            )
            for seat, guess in zip(seats, guesses, strict=True)
        )
        draft_ms = (self._clock.monotonic_s() - started_s) * 1e3
        decision = choose(self._settings, self.replica, candidates, costs, draft_ms=draft_ms)
        return StepPlan(
            drafts=tuple(
                guess.token_ids[:count]
                for guess, count in zip(guesses, decision.drafts, strict=True)
            ),
            decision=decision,
            seats=tuple(seats),
            guesses=guesses,
            candidates=candidates,
            costs=costs,
            context_tokens=context_tokens,
            draft_ms=draft_ms,
        )

    def _guesses(self, seats: Sequence[Seat], costs: StepCosts) -> tuple[Draft, ...]:
        states = [seat.speculation.state for seat in seats]
        auto = may_draft(self._settings, self.replica, states, costs)
        guesses = []
        for seat in seats:
            forced = seat.speculation.forced
            if forced == 0 or (forced < 0 and not auto):
                guesses.append(NO_DRAFT)
                continue
            self._follow(seat.speculation, seat.ids)
            limit = min(seat.limit, self._settings.max_drafts)
            guesses.append(seat.speculation.drafter.propose(limit))
        return tuple(guesses)

    def _follow(self, speculation: Speculation, ids: np.ndarray) -> None:
        """Catch up with what the sequence has become since the last call."""
        tokens = ids[speculation.followed :].tolist()
        speculation.followed = len(ids)
        speculation.drafter.extend(tokens)
        for trial in speculation.state.acceptance.follow(tokens):
            speculation.tally.add_trial(trial)

    def settle(self, plan: StepPlan, verdicts: Sequence[Verdict], *, forward_ms: float) -> None:
        """Learn from the step that ``plan`` led to; one verdict per sequence, in order."""
        batch = len(plan.seats)
        rows = batch + sum(len(drafts) for drafts in plan.drafts)
        self.table.observe(CostSample(rows, plan.context_tokens, batch, forward_ms))
        result = StepResult(
            forward_ms, plan.draft_ms, tuple(verdict.plain_steps for verdict in verdicts)
        )
        settle(self._settings, self.replica, plan.candidates, plan.decision, result)
        self._steps_by_reason[plan.decision.reason.value] += 1
        for seat, drafts, guess in zip(plan.seats, plan.drafts, plan.guesses, strict=True):
            speculation = seat.speculation
            self._steps_by_drafts[len(drafts)] += 1
            costs = ArmCosts.of(plan.costs, base_rows=batch, chosen=len(drafts))
            speculation.state.acceptance.open(guess.token_ids, guess.match_tokens, costs)
            if speculation.forced != 0 and not guess.token_ids and costs.known:
                speculation.tally.add(0, costs)

    def finish(self, speculation: Speculation, ids: np.ndarray) -> None:
        """The request ended with these tokens: keep its hindsight."""
        if speculation.forced == 0:
            return
        self._follow(speculation, ids)
        if speculation.tally.points:
            self._requests += 1
            self._right += speculation.tally.regret <= self._settings.margin
            self._tally.merge(speculation.tally)

    def report(self, *, context_tokens: int) -> ReplicaReport:
        """State of this replica, with costs for one sequence at this context."""
        costs = self.table.step_costs(batch=1, context_tokens=context_tokens)
        ledger = self.replica.ledger
        return ReplicaReport(
            base_ms=costs.at(1),
            arms=arm_reports(costs, self._tally),
            acceptance_by_position=self.replica.hazards.by_position(),
            steps_by_reason=dict(self._steps_by_reason),
            steps_by_drafts=dict(self._steps_by_drafts),
            draft_ms=self.replica.draft_ms,
            overspend_share=ledger.overspend_ms / ledger.plain_ms if ledger.plain_ms else 0.0,
            best_fixed_drafts=self._tally.best_arm,
            regret=self._tally.regret,
            decision_accuracy=self._right / self._requests if self._requests else 1.0,
            requests=self._requests,
        )
