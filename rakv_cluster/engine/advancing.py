"""Running a step: compute it, advance its sequences, emit their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from rakv_cluster.clock import Clock
from rakv_cluster.engine.drafting import DraftedStep, Drafting, judge
from rakv_cluster.engine.emission import Emitter
from rakv_cluster.engine.near_ties import (
    NOTHING_DECIDED,
    Decided,
    decide,
    is_lone,
    note_lone,
    start_replay,
)
from rakv_cluster.engine.packing import Part
from rakv_cluster.engine.scheduler import TenantShares
from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.engine.stats import Counters
from rakv_cluster.engine.stepper import Computed, Stepper
from rakv_cluster.model.sampling import Choice
from rakv_cluster.speculation.verification import Verdict
from rakv_cluster.types import FinishReason

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """Requests that a step ended: ``ended`` have had their last event, ``failed`` need one."""

    ended: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    healthy: bool = True


class Advancer:
    """Takes sequences forward by steps. Closes none: what ended is the caller's to clean up, after
    all of a step's tokens are out."""

    def __init__(
        self,
        stepper: Stepper,
        drafting: Drafting,
        emitter: Emitter,
        *,
        counters: Counters,
        tenants: TenantShares,
        clock: Clock,
    ) -> None:
        self._stepper = stepper
        self._drafting = drafting
        self._emitter = emitter
        self._counters = counters
        self._tenants = tenants
        self._clock = clock

    def run(self, step: DraftedStep) -> Outcome:
        """One step. If it fails, its sequences run one by one, and only those that fail end.

        ``healthy`` is False if none of them could be computed.
        """
        outcome = Outcome()
        if self._try(step, outcome) is None:
            return outcome
        errors = [self._try(single, outcome) for single in step.singly]
        for part, error in zip(step.parts, errors, strict=True):
            if error is not None:
                outcome.failed.append((part.sequence, _describe(error)))
        outcome.healthy = None in errors
        return outcome

    def _try(self, step: DraftedStep, outcome: Outcome) -> Exception | None:
        """Compute and apply; the error if computing failed, in which case nothing has changed."""
        try:
            computed = self._stepper.compute(step.parts)
        except Exception as error:  # out of memory and kernel errors come as any type
            self._counters.step_failures += 1
            log.warning("a step of %d sequences failed", len(step.parts), exc_info=True)
            return error
        self._apply(step, computed, outcome)
        return None

    def _apply(self, step: DraftedStep, computed: Computed, outcome: Outcome) -> None:
        """Advance lengths over what is verified, and emit tokens."""
        now_s = self._clock.monotonic_s()
        self._counters.steps += 1
        lone = is_lone(step.parts)
        verdicts: list[Verdict] = []
        chosen: list[tuple[Part, Many[Choice], Decided]] = []
        for part, choices in zip(step.parts, computed.choices, strict=True):
            decided = NOTHING_DECIDED
            if choices:
                verdicts.append(judge(part, choices))
                decided = decide(part, choices, verdicts[-1], lone=lone)
                chosen.append((part, choices, decided))
            self._advance(part, decided.verdict.verified_rows, computed, lone)
        # Near-ties are no fault of the drafts: what those brought is learned as judged. Before
        # tokens go out: a request's last event accounts for its last step too.
        self._drafting.settle(step, verdicts, computed.ms)
        for part, made, decided in chosen:
            try:
                ended = self._take(part, made, decided, now_s)
            except Exception as error:  # a grammar may refuse what it let through, or allow nothing
                log.exception("tokens of request %s were refused", part.sequence.request.request_id)
                outcome.failed.append((part.sequence, _describe(error)))
                continue
            if ended:
                outcome.ended.append(part.sequence)

    def _advance(self, part: Part, rows: int, computed: Computed, lone: bool) -> None:
        """Advance the verified length over ``rows`` rows from the part's last known token on."""
        sequence, verified = part.sequence, part.tokens + rows - 1
        if lone:
            note_lone(sequence)
        if sequence.replaying:
            self._counters.replay_steps += 1
            self._counters.replay_ms += computed.ms
        sequence.advance(verified)
        self._counters.computed_tokens += verified
        self._tenants.charge(sequence.request.tenant, verified)

    def _take(self, part: Part, choices: Many[Choice], decided: Decided, now_s: float) -> bool:
        """Take the chosen tokens that count; whether the request ended with them."""
        sequence, verdict = part.sequence, decided.verdict
        sequence.replaying = False
        if decided.replay:
            start_replay(sequence)
            self._counters.replays += 1
            if not verdict.emitted:
                return False
        starts = sequence.first_token_s < 0
        if starts:
            sequence.first_token_s = now_s
        else:
            sequence.blocks[len(part.drafts), verdict.accepted] += 1
        taken = choices[: verdict.emitted]
        stopped = sequence.take([choice.token_id for choice in taken])
        if verdict.finish is not None:
            sequence.rule.check_end()
        finish = FinishReason.STOP if stopped else verdict.finish
        self._counters.output_tokens += verdict.emitted
        delivered = self._emitter.emit(
            sequence, taken=taken, finish=finish, stop_token_id=verdict.stop_token_id
        )
        if finish is not None or not delivered:
            return True
        if starts:
            self._drafting.begin(sequence)
        return False


def _describe(error: Exception) -> str:
    """What a client may know of a failed forward."""
    return f"the model could not compute this request ({type(error).__name__})"
