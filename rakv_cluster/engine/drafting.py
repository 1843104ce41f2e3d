"""Between the engine's parts and the speculator: which steps draft, and what came of it.

Only steps in which every sequence is a running stream draft. Beside prompt rows a draft's cost
cannot be told from theirs, and the step's length is bounded for the streams' sake already.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from rakv_cluster.engine.packing import Part
from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.model.sampling import Choice
from rakv_cluster.speculation.seats import Seat
from rakv_cluster.speculation.speculator import Speculator, StepPlan
from rakv_cluster.speculation.verification import Verdict, draft_limit, judge_block


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step's parts, with drafts where ``plan`` decided on any; None: not a decode step."""

    parts: tuple[Part, ...]
    plan: StepPlan | None = None

    @property
    def singly(self) -> tuple[DraftedStep, ...]:
        """Every part as a plain step of its own, to find out which of them fails."""
        return tuple(DraftedStep((part.plain,)) for part in self.parts)


class Drafting:
    """Adds drafts to steps and reports back what they brought."""

    def __init__(self, speculator: Speculator, *, max_step_tokens: int) -> None:
        self._speculator = speculator
        self._max_step_tokens = max_step_tokens

    def draft(self, parts: Many[Part]) -> DraftedStep:
        """The step over ``parts``, with drafts behind them if it is a decode step."""
        spare = (self._max_step_tokens - len(parts)) // len(parts)
        seats = [
            Seat(
                speculation,
                part.sequence.known_ids,
                min(spare, _limit(part.sequence)),
                part.sequence.buffer,
            )
            for part in parts
            if (speculation := part.sequence.speculation) is not None
            and part.tokens == part.choices == 1
            and not part.sequence.replaying
        ]
        # Where nobody drafts, nothing is to be decided or learned: K=0 costs what it costs.
        if len(seats) < len(parts) or all(seat.speculation.is_off for seat in seats):
            return DraftedStep(tuple(parts))
        if self._speculator.rests(seats):
            return DraftedStep(tuple(parts))
        plan = self._speculator.plan(seats)
        drafted = zip(parts, plan.drafts, strict=True)
        return DraftedStep(
            tuple(Part(part.sequence, part.tokens, drafts) for part, drafts in drafted), plan
        )

    def settle(self, step: DraftedStep, verdicts: Many[Verdict], forward_ms: float) -> None:
        """Learn from a step that was computed; one verdict per part of a decode step."""
        if step.plan is not None:
            self._speculator.settle(step.plan, verdicts, forward_ms=forward_ms)

    def begin(self, sequence: Sequence) -> None:
        """``sequence`` has emitted its first token."""
        prefill_ms = (sequence.first_token_s - sequence.first_forward_s) * 1e3
        sequence.speculation = self._speculator.begin(
            sequence.request.speculation,
            sequence.known_ids,
            sequence.rule,
            prefill_ms=prefill_ms,
            tokens_left=sequence.request.max_tokens - sequence.output_tokens,
        )

    def finish(self, sequence: Sequence) -> None:
        """``sequence`` has ended, before or after its first token."""
        if sequence.speculation is not None:
            self._speculator.finish(sequence.speculation, sequence.known_ids)


def _limit(sequence: Sequence) -> int:
    """Most drafts of use: no more than the request may emit or its buffer hold."""
    capacity = sequence.buffer.capacity if sequence.buffer is not None else 0
    return draft_limit(
        tokens_left=sequence.request.max_tokens - sequence.output_tokens,
        free_slots=capacity - sequence.length,
    )


def judge(part: Part, choices: Many[Choice]) -> Verdict:
    """Which of the tokens chosen at a part's rows count."""
    request = part.sequence.request
    return judge_block(
        part.drafts,
        [choice.token_id for choice in choices],
        tokens_left=request.max_tokens - part.sequence.output_tokens,
        stop_token_ids=request.stop_token_ids,
    )
