"""Drafting by a model, for several sequences at once: one forward for each place in the block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import functional

from rakv_cluster.clock import Clock
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.sampling import Choice, RuleRow, TokenRule, choose
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.speculation.confidence import rate_of
from rakv_cluster.speculation.drafters import NO_DRAFT, Draft

_MS_GAIN = 0.1
_STALL_FACTOR = 1.5

CALIBRATION_ROUNDS = 5
"""Of which the first does not count, and of the others the quickest does: load only ever adds."""


@dataclass(slots=True)
class MeanMs:
    """What something takes: a mean of the first times, then of late. What takes far longer than
    the mean counts as :data:`_STALL_FACTOR` times it."""

    ms: float = 0.0
    samples: int = 0

    def add(self, ms: float) -> None:
        """It took so long once more."""
        if self.samples > 1:
            ms = min(ms, _STALL_FACTOR * self.ms)
        self.samples += 1
        self.ms += (ms - self.ms) * max(_MS_GAIN, 1 / self.samples)


@dataclass(slots=True, eq=False)
class DraftState:
    """One sequence in a model that drafts.

    ``ids`` are its accepted tokens. A draft model keeps KV of its own in ``buffer``, of the tokens
    ``computed``: drafts among them may have been rejected since.
    """

    rule: TokenRule
    ids: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    buffer: KvBuffer | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """Where drafting ends by itself: behind ``most``, or where the chance that all so far are right
    is below ``least_chance``, by acceptance ``rates`` per band of confidence."""

    most: int
    least_chance: float
    rates: tuple[float, ...]

    def ends(self, confidences: Sequence[float]) -> bool:
        """Whether drafts made with these probabilities are the last."""
        chance = math.prod(rate_of(self.rates, each) for each in confidences)
        return len(confidences) >= self.most or chance < self.least_chance


@dataclass(frozen=True, slots=True)
class DraftWish:
    """So many drafts (at least one) for one sequence; ``target_kv`` is the KV of its accepted
    tokens but the last, if there is any. A model that knows how sure it is goes by ``stopping``, if
    given, in place of the number."""

    state: DraftState
    drafts: int
    target_kv: KvBuffer | None = None
    stopping: Stopping | None = None

    @property
    def most(self) -> int:
        """Drafts there must be room for."""
        return self.drafts if self.stopping is None else self.stopping.most


class ModelDrafter(Protocol):
    """A model that drafts where a sequence's text offers nothing. Belongs to one thread."""

    @property
    def agreement(self) -> float:
        """Share of its drafts that are expected to be right, until they are seen."""
        ...

    @property
    def round_ms(self) -> float:
        """Expected time of one more draft for every sequence that takes part."""
        ...

    def catch_up_ms(self, state: DraftState) -> float:
        """Expected time before a sequence's first draft."""
        ...

    def can_draft(self, wish: DraftWish) -> bool:
        """Whether context and memory have room for it."""
        ...

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """What each sequence's next tokens would be by this model, nothing where there is no room.

        Raises what the model raises.
        """
        ...

    def close(self, state: DraftState) -> None:
        """Free what a sequence holds."""
        ...


@dataclass(slots=True)
class Running:
    """A sequence while it drafts: ``pending`` tokens are to be run, the first at ``position``; the
    last one's logits say the next draft. What was run is added to ``ran``."""

    wish: DraftWish
    buffer: KvBuffer
    position: int
    pending: list[int]
    ran: list[int]
    drafted: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether another draft is wanted."""
        if self.wish.stopping is None:
            return len(self.drafted) < self.wish.drafts
        return not self.wish.stopping.ends(self.confidences)

    def take(self, choice: Choice) -> None:
        """Draft what was chosen."""
        self.drafted.append(choice.token_id)
        self.pending = [choice.token_id]
        if choice.logprob is not None:
            self.confidences.append(math.exp(choice.logprob))


class DraftRounds:
    """Rounds of a model's forwards, and what one takes."""

    def __init__(self, runner: Runner, clock: Clock, *, vocab_size: int) -> None:
        """``vocab_size`` is the target's, where padding makes it another than the runner's."""
        self.runner = runner
        self.vocab_size = vocab_size or runner.vocab_size
        self._clock = clock
        self.round = MeanMs()

    def draft(self, running: Sequence[Running | None]) -> list[Draft]:
        """Drafts of every sequence, as many as it wants; none where there is no sequence."""
        active = [each for each in running if each is not None]
        if active:
            self._run(active)
        return [
            NO_DRAFT
            if each is None
            else Draft(tuple(each.drafted), confidences=tuple(each.confidences))
            for each in running
        ]

    def _run(self, running: Sequence[Running]) -> None:
        began_s = self._clock.monotonic_s()
        self._round(running)  # what is behind the last known tokens comes with this forward
        first_s = self._clock.monotonic_s()
        while active := [each for each in running if each.goes_on]:
            self._round(active)
        rounds = max(len(each.drafted) for each in running)
        ended_s = self._clock.monotonic_s()
        later_ms = (ended_s - first_s) * 1e3 / (rounds - 1) if rounds > 1 else 0.0
        self.round.add(later_ms or (first_s - began_s) * 1e3)

    def _round(self, running: Sequence[Running]) -> None:
        """Run everything pending and take one draft of each sequence."""
        logits = self.forward(running, [each.pending for each in running], wanted=True)
        missing = self.vocab_size - logits.shape[1]  # columns of padding, more or fewer
        logits = functional.pad(logits, (0, missing), value=-math.inf) if missing else logits
        rows = [
            RuleRow(
                each.wish.state.rule,
                position=each.position,
                pending=tuple(each.drafted),
                top_logprobs=-1 if each.wish.stopping is None else 0,
            )
            for each in running
        ]
        for each, choice in zip(running, choose(logits, rows), strict=True):
            each.take(choice)

    def forward(
        self, running: Sequence[Running], tokens: Sequence[Sequence[int]], *, wanted: bool
    ) -> torch.Tensor:
        """Run ``tokens`` of each sequence; logits of each one's last if ``wanted``, else none."""
        spans, positions, last_rows, row = [], [], [], 0
        for each, mine in zip(running, tokens, strict=True):
            first, stop = each.position, row + len(mine)
            spans.append(Span(each.buffer, row, stop, first, first + len(mine) - 1))
            positions.append(torch.arange(first, first + len(mine)))
            last_rows.append(stop - 1)
            row = stop
        logits = self.runner.forward(
            Step(
                token_ids=torch.tensor([token for mine in tokens for token in mine]),
                positions=torch.cat(positions),
                spans=tuple(spans),
                logit_rows=torch.tensor(last_rows if wanted else [], dtype=torch.int64),
            )
        )
        for each, mine in zip(running, tokens, strict=True):
            each.ran.extend(mine)
            each.position += len(mine)
        return logits
