"""The engine's view of speculation: a thin shell around drafters, cost table and controller.

Per decode step the engine calls :meth:`Speculator.plan`, runs one forward over the drafts it
returns, and reports back with :meth:`Speculator.settle`. What was really emitted is read from the
sequences themselves at the next plan, so steps in between need no bookkeeping. Used by the engine
thread only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rakv_cluster.clock import Clock
from rakv_cluster.model.sampling import TokenRule
from rakv_cluster.speculation.arms import ArmCosts
from rakv_cluster.speculation.booking import StepResult, book_setup, settle
from rakv_cluster.speculation.controller import (
    Candidate,
    ControllerSettings,
    ReplicaState,
    RequestState,
    asking_ms,
    choose,
    may_draft,
)
from rakv_cluster.speculation.cost_model import CostSample, CostTable, StepCosts
from rakv_cluster.speculation.decision import Decision, Reason
from rakv_cluster.speculation.draft_rounds import ModelDrafter
from rakv_cluster.speculation.drafters import NO_DRAFT, Draft, Drafter, NullDrafter, SuffixDrafter
from rakv_cluster.speculation.governor import charge, half_used, idle_steps, steps_until
from rakv_cluster.speculation.report import HindsightTally, ReplicaReport, StepTrace, arm_reports
from rakv_cluster.speculation.seats import Seat, Speculation
from rakv_cluster.speculation.sources import Sources
from rakv_cluster.speculation.verification import Verdict

_LONGEST_REST_STEPS = 64

SpeculationMode = Literal["auto", "off", "1", "2", "4", "8", "trace"]
"""What a request may ask for: the controller's choice, none, or the paper's fixed arms; "trace"
is "auto" with every step's decision kept."""

SPECULATION_MODES: tuple[SpeculationMode, ...] = get_args(SpeculationMode)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Drafts per sequence for the next step, and why.

    ``guesses`` are what the drafts were taken from; ``passed_over`` what the text offered where a
    model was asked. ``making_ms`` is what a model's drafts took, ``control_ms`` all else that
    planning did: ``draft_ms`` of guessing too (0 where nobody was ``asked``).
    """

    drafts: tuple[tuple[int, ...], ...]
    decision: Decision
    seats: tuple[Seat, ...]
    guesses: tuple[Draft, ...]
    passed_over: tuple[Draft, ...]
    candidates: tuple[Candidate, ...]
    costs: StepCosts
    context_tokens: int
    asked: bool
    draft_ms: float
    making_ms: float
    control_ms: float


class Speculator:
    """A replica's speculation: learns from every request it sees."""

    def __init__(
        self,
        table: CostTable,
        settings: ControllerSettings,
        clock: Clock,
        new_drafter: Callable[[], Drafter] = SuffixDrafter,
        draft_model: ModelDrafter | None = None,
    ) -> None:
        """``draft_model`` is asked where it promises more than a sequence's own drafter."""
        self.table = table
        self.replica = ReplicaState()
        self._settings = settings
        self._clock = clock
        self._new_drafter = new_drafter
        self._sources = Sources(settings, self.replica, clock, draft_model)
        self._tally = HindsightTally()
        self._steps_by_reason: Counter[str] = Counter()
        self._steps_by_drafts: Counter[int] = Counter()
        self._requests = 0
        self._right = 0
        self._settle_ms = 0.0
        self._rest_steps = 0

    def begin(
        self,
        mode: SpeculationMode,
        ids: np.ndarray,
        rule: TokenRule,
        *,
        prefill_ms: float,
        tokens_left: int,
    ) -> Speculation:
        """Follow a sequence from its first decode step on: call it when the first token is out.

        Its drafter reads the tokens so far (about 0.4 ms per 1,000), booked as overspend; a draft
        model reads them when it is first asked. ``rule`` is how its tokens are chosen, of which
        there are at most ``tokens_left`` to come.
        """
        self._rest_steps = 0  # it was for others
        base_ms = self.table.step_costs(batch=1, context_tokens=len(ids)).at(1)
        likely_tokens = self.replica.lengths.likely_tokens(tokens_left)
        state = RequestState.begin(
            self.replica,
            prefill_ms=prefill_ms,
            likely_decode_ms=likely_tokens * base_ms if likely_tokens else 0.0,
        )
        if mode == "off":
            return Speculation(NullDrafter(), state, 0, len(ids), tokens_left)
        forced = int(mode) if mode.isdecimal() else -1
        model = self._sources.begin(rule)
        speculation = Speculation(
            self._new_drafter(),
            state,
            forced,
            len(ids),
            tokens_left,
            model=model,
            traced=mode == "trace",
        )
        started_s = self._clock.monotonic_s()
        self._follow(speculation, ids)
        book_setup(self.replica, state, (self._clock.monotonic_s() - started_s) * 1e3)
        return speculation

    def rests(self, seats: Sequence[Seat]) -> bool:
        """Whether the next decode step is to be left alone, without :meth:`plan`.

        So it is where the ledgers cannot even pay for deciding, until plain steps have. A request
        that asked for its drafts gets them all the same.
        """
        if self._rest_steps == 0 or any(seat.speculation.forced > 0 for seat in seats):
            return False
        self._rest_steps -= 1
        base_ms = self._costs(seats).at(len(seats))
        ledgers = [s.speculation.state.ledger for s in seats if not s.speculation.is_off]
        if ledgers and math.isfinite(base_ms):
            charge(
                self._settings.governor,
                self.replica.ledger,
                ledgers,
                base_ms=base_ms,
                spent_ms=base_ms,
                plain_steps=[1] * len(ledgers),
            )
        self._steps_by_reason[Reason.RESTED.value] += 1
        self._steps_by_drafts[0] += len(seats)
        for seat in seats:
            if seat.speculation.traced:
                seat.speculation.trace.append(_rested(len(seats), base_ms))
        return True

    def _costs(self, seats: Sequence[Seat]) -> StepCosts:
        return self.table.step_costs(batch=len(seats), context_tokens=_context_tokens(seats))

    def plan(self, seats: Sequence[Seat]) -> StepPlan:
        """Drafts for a decode step over these sequences."""
        started_s = self._clock.monotonic_s()
        costs = self._costs(seats)
        asked = self._asked(seats, costs)
        texts = self._guesses(seats, asked)
        candidates = tuple(
            self._sources.candidate(seat, text, costs, len(seats))
            for seat, text in zip(seats, texts, strict=True)
        )
        draft_ms = (self._clock.monotonic_s() - started_s) * 1e3 if any(asked) else 0.0
        decision = choose(self._settings, self.replica, candidates, costs, draft_ms=draft_ms)
        guesses, making_ms = self._sources.made(seats, texts, candidates, decision)
        drafts = tuple(
            guess.token_ids[: max(count, most)]
            for guess, count, most in zip(guesses, decision.drafts, decision.most, strict=True)
        )
        decision = decision.as_made([len(each) for each in drafts])
        # What settling the last step took is this one's to pay: it was not known before.
        planned_ms = (self._clock.monotonic_s() - started_s) * 1e3
        return StepPlan(
            drafts=drafts,
            decision=decision,
            seats=tuple(seats),
            guesses=guesses,
            passed_over=tuple(
                NO_DRAFT if guess is text else text
                for guess, text in zip(guesses, texts, strict=True)
            ),
            candidates=candidates,
            costs=costs,
            context_tokens=_context_tokens(seats),
            asked=any(asked),
            draft_ms=draft_ms,
            making_ms=making_ms,
            control_ms=planned_ms - making_ms + self._settle_ms,
        )

    def _rest_after(self, plan: StepPlan) -> int:
        """Plain steps until there is enough to decide once more, and to ask or to draft if that is
        all that keeps from it: until then deciding would only cost."""
        decision, governor, ledger = plan.decision, self._settings.governor, self.replica.ledger
        requests = [c.state.ledger for c in plan.candidates if c.forced < 0]
        base_ms, batch = decision.base_ms, len(plan.seats)
        if not requests or math.isinf(base_ms):
            return 0

        def until(needed_ms: float) -> float:
            return steps_until(
                governor, ledger, requests, base_ms=base_ms, batch=batch, needed_ms=needed_ms
            )

        deciding_ms = plan.control_ms
        idle = idle_steps(governor, base_ms=base_ms, deciding_ms=deciding_ms)
        needed_ms = deciding_ms
        if not plan.asked:
            needed_ms += asking_ms(self._settings, self.replica, plan.costs, batch)
        steps = until(needed_ms)
        if plan.asked and decision.reason is Reason.GOVERNED:
            needed_ms += min(each.needed_ms for each in decision.options if not each.allowed)
            # Not beyond ``idle``: the next guess may be worth its price with fewer drafts.
            steps = max(steps, min(until(needed_ms), idle))
        if not decision.reason.drafts and half_used(governor, ledger, base_ms=base_ms, batch=batch):
            steps = max(steps, idle)
        return math.ceil(min(max(steps, 0.0), _LONGEST_REST_STEPS))  # it may be never: inf

    def _asked(self, seats: Sequence[Seat], costs: StepCosts) -> list[bool]:
        """Whose drafters are asked."""
        states = [seat.speculation.state for seat in seats]
        auto = may_draft(self._settings, self.replica, states, costs)
        return [(auto if (forced := seat.speculation.forced) < 0 else forced > 0) for seat in seats]

    def _guesses(self, seats: Sequence[Seat], asked: Sequence[bool]) -> tuple[Draft, ...]:
        guesses = []
        for seat, is_asked in zip(seats, asked, strict=True):
            if not is_asked:
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
        if speculation.model is not None:
            speculation.model.ids += tokens
        for trial in speculation.state.acceptance.follow(tokens):
            speculation.tally.add_trial(trial)

    def settle(self, plan: StepPlan, verdicts: Sequence[Verdict], *, forward_ms: float) -> None:
        """Learn from the step that ``plan`` led to; one verdict per sequence, in order."""
        started_s = self._clock.monotonic_s()
        batch = len(plan.seats)
        rows = batch + sum(len(drafts) for drafts in plan.drafts)
        self.table.observe(CostSample(rows, plan.context_tokens, batch, forward_ms))
        result = StepResult(
            forward_ms=forward_ms,
            making_ms=plan.making_ms,
            draft_ms=plan.draft_ms,
            control_ms=plan.control_ms,
            plain_steps=tuple(verdict.plain_steps for verdict in verdicts),
            surprising=self.table.surprised,
        )
        settle(self._settings, self.replica, plan.candidates, plan.decision, result)
        self._steps_by_reason[plan.decision.reason.value] += 1
        per_seat = zip(
            plan.seats, plan.drafts, plan.guesses, plan.passed_over, plan.candidates, strict=True
        )
        for seat, drafts, guess, passed_over, candidate in per_seat:
            speculation = seat.speculation
            if candidate.by_model:
                speculation.model_drafts += len(drafts)
            else:
                speculation.text_drafts += len(drafts)
            self._steps_by_drafts[len(drafts)] += 1
            acceptance = speculation.state.acceptance
            if not guess.token_ids:
                acceptance.pass_by()
                # What a draft model would have said is not known unless it was asked.
                unknown = speculation.is_off or speculation.model is not None
                if not unknown and math.isfinite(plan.costs.at(batch)):
                    speculation.tally.add_plain(plan.costs.at(batch))
                continue
            costs = ArmCosts.of(
                plan.costs,
                base_rows=batch,
                chosen=len(drafts),
                available=len(guess.token_ids),
                round_ms=candidate.round_ms if drafts else 0.0,
            )
            acceptance.watch(passed_over, costs)
            acceptance.open(guess, costs)
        self._trace(plan, verdicts, forward_ms)
        self._rest_steps = self._rest_after(plan)
        self._settle_ms = (self._clock.monotonic_s() - started_s) * 1e3

    def _trace(self, plan: StepPlan, verdicts: Sequence[Verdict], forward_ms: float) -> None:
        """Keep the step's decision for the requests that asked for it."""
        decision = plan.decision
        for index, (seat, verdict) in enumerate(zip(plan.seats, verdicts, strict=True)):
            if seat.speculation.traced:
                seat.speculation.trace.append(
                    StepTrace(
                        reason=decision.reason.value,
                        batch=len(plan.seats),
                        available=plan.candidates[index].available,
                        drafts=len(plan.drafts[index]),
                        accepted=verdict.accepted,
                        expected_tokens=decision.expected_tokens,
                        base_ms=_finite(decision.base_ms),
                        predicted_ms=_finite(decision.predicted_ms),
                        measured_ms=forward_ms,
                        control_ms=plan.making_ms + plan.control_ms,
                    )
                )

    def finish(self, speculation: Speculation, ids: np.ndarray) -> None:
        """The request ended with these tokens: keep its length and its hindsight."""
        self._rest_steps = 0
        self._sources.finish(speculation.model)
        answered = len(ids) - speculation.known_tokens
        self.replica.lengths.record(answered, limit=speculation.tokens_left)
        if speculation.is_off:
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


def _rested(batch: int, base_ms: float) -> StepTrace:
    return StepTrace(
        reason=Reason.RESTED.value,
        batch=batch,
        available=0,
        drafts=0,
        accepted=0,
        expected_tokens=float(batch),
        base_ms=_finite(base_ms),
        predicted_ms=_finite(base_ms),
        measured_ms=0.0,
        control_ms=0.0,
    )


def _context_tokens(seats: Sequence[Seat]) -> int:
    return sum(len(seat.ids) for seat in seats) // len(seats)


def _finite(ms: float) -> float:
    return ms if math.isfinite(ms) else 0.0
