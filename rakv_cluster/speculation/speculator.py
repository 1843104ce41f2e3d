"""The engine's view of speculation: a thin shell around drafters, cost table and controller.

Per decode step the engine calls :meth:`Speculator.plan`, runs one forward over the drafts it
returns, and reports back with :meth:`Speculator.settle`. Used by the engine thread only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from rakv_cluster.clock import Clock
from rakv_cluster.speculation.controller import (
    Candidate,
    ControllerSettings,
    Decision,
    ReplicaState,
    RequestState,
    StepResult,
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
    """One request's drafter, learned state and counts."""

    drafter: Drafter
    state: RequestState
    forced: int
    tally: HindsightTally = field(default_factory=HindsightTally)
    steps_by_drafts: Counter[int] = field(default_factory=Counter)
    accepted_tokens: int = 0
    unseen_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Drafts per sequence for the next step, and why."""

    drafts: tuple[tuple[int, ...], ...]
    decision: Decision
    guesses: tuple[Draft, ...]
    candidates: tuple[Candidate, ...]
    costs: StepCosts
    context_tokens: int
    draft_ms: float

    @property
    def is_plain(self) -> bool:
        """Whether every sequence gets one row and nothing has to be verified."""
        return not any(self.drafts)


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

    def begin(
        self, token_ids: Sequence[int], *, mode: SpeculationMode, prefill_ms: float
    ) -> Speculation:
        """Follow a sequence of these tokens from its first decode step on.

        The drafter reads them at the first :meth:`plan`, so that they delay no first token.
        """
        state = RequestState.begin(self.replica, prefill_ms=prefill_ms)
        if mode == "off":
            return Speculation(NullDrafter(), state, forced=0)
        forced = -1 if mode == "auto" else int(mode)
        return Speculation(self._new_drafter(), state, forced=forced, unseen_ids=tuple(token_ids))

    def plan(
        self, sequences: Sequence[Speculation], limits: Sequence[int], *, context_tokens: int
    ) -> StepPlan:
        """Drafts for a decode step over ``sequences`` at this mean context.

        ``limits`` say how many drafts each can use at most (:func:`draft_limit`).
        """
        costs = self.table.step_costs(batch=len(sequences), context_tokens=context_tokens)
        started_s = self._clock.monotonic_s()
        guesses = self._guesses(sequences, limits, costs)
        draft_ms = (self._clock.monotonic_s() - started_s) * 1e3
        candidates = tuple(
            Candidate(sequence.state, len(guess.token_ids), guess.match_tokens, sequence.forced)
            for sequence, guess in zip(sequences, guesses, strict=True)
        )
        decision = choose(self._settings, self.replica, candidates, costs, draft_ms=draft_ms)
        drafts = tuple(
            guess.token_ids[:count] for guess, count in zip(guesses, decision.drafts, strict=True)
        )
        return StepPlan(drafts, decision, guesses, candidates, costs, context_tokens, draft_ms)

    def _guesses(
        self, sequences: Sequence[Speculation], limits: Sequence[int], costs: StepCosts
    ) -> tuple[Draft, ...]:
        states = [sequence.state for sequence in sequences]
        auto = may_draft(self._settings, self.replica, states, costs)
        guesses = []
        for sequence, limit in zip(sequences, limits, strict=True):
            if sequence.forced == 0 or (sequence.forced < 0 and not auto):
                guesses.append(NO_DRAFT)
                continue
            if sequence.unseen_ids:
                sequence.drafter.extend(sequence.unseen_ids)
                sequence.unseen_ids = ()
            guesses.append(sequence.drafter.propose(min(limit, self._settings.max_drafts)))
        return tuple(guesses)

    def settle(
        self,
        plan: StepPlan,
        sequences: Sequence[Speculation],
        emitted: Sequence[Sequence[int]],
        verdicts: Sequence[Verdict],
        *,
        forward_ms: float,
    ) -> None:
        """Learn from the step that ``plan`` led to; ``emitted`` are its new output tokens."""
        batch = len(sequences)
        rows = batch + sum(len(drafts) for drafts in plan.drafts)
        self.table.observe(CostSample(rows, plan.context_tokens, batch, forward_ms))
        result = StepResult(
            forward_ms, plan.draft_ms, tuple(verdict.plain_steps for verdict in verdicts)
        )
        settle(self._settings, self.replica, plan.candidates, plan.decision, result)
        self._steps_by_reason[plan.decision.reason.value] += 1
        for index, sequence in enumerate(sequences):
            self._settle_one(plan, index, sequence, emitted[index], verdicts[index])

    def _settle_one(
        self,
        plan: StepPlan,
        index: int,
        sequence: Speculation,
        emitted: Sequence[int],
        verdict: Verdict,
    ) -> None:
        count, guess = len(plan.drafts[index]), plan.guesses[index]
        sequence.steps_by_drafts[count] += 1
        self._steps_by_drafts[count] += 1
        sequence.accepted_tokens += min(verdict.accepted, verdict.emitted)
        if sequence.forced == 0:
            return
        sequence.unseen_ids += tuple(emitted)
        costs = ArmCosts.of(plan.costs, base_rows=len(plan.drafts), chosen=count)
        if not guess.token_ids and math.isfinite(costs.chosen_ms):
            sequence.tally.add(0, costs)
        settled = sequence.state.acceptance.observe(
            guess.token_ids, guess.match_tokens, emitted, costs
        )
        for trial in settled:
            sequence.tally.add_trial(trial)

    def finish(self, sequence: Speculation) -> None:
        """The request is over: keep its hindsight."""
        tally = sequence.tally
        if tally.points == 0:
            return
        self._requests += 1
        self._right += tally.regret <= self._settings.margin
        self._tally.merge(tally)

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
