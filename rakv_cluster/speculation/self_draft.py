"""Drafts by the target's own weights in four bits, over the target's own KV.

No second KV, no prompt to compute, nothing to bring up to date: a draft's K/V are written into the
slots behind the sequence's verified length, where the next draft reads them. Verification runs the
same tokens at the same positions through the target and so overwrites every one of those slots
before it reads it; slots behind a verified length are never stored nor shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rakv_cluster.clock import Clock
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.sampling import TokenRule
from rakv_cluster.model.step import Runner
from rakv_cluster.speculation.draft_rounds import (
    CALIBRATION_ROUNDS,
    DraftRounds,
    DraftState,
    DraftWish,
    MeanMs,
    Running,
)
from rakv_cluster.speculation.drafters import Draft
from rakv_cluster.types import SamplingParams

USUAL_AGREEMENT = 0.8
"""Expected of four-bit weights before any draft was seen (docs/experiments.md)."""

_CALIBRATION_TOKENS = 256
_CALIBRATION_DRAFTS = 4


class SelfDraft:
    """A :class:`~rakv_cluster.speculation.draft_rounds.ModelDrafter` over the target's buffers."""

    def __init__(self, runner: Runner, clock: Clock, *, agreement: float = USUAL_AGREEMENT) -> None:
        """``runner`` reads and writes KV of the target's layout."""
        self.agreement = agreement
        self._rounds = DraftRounds(runner, clock, vocab_size=0)

    @property
    def round_ms(self) -> float:
        """Expected time of one more draft for every sequence that takes part."""
        return self._rounds.round.ms

    def calibrate(self) -> None:
        """Measure a round on scratch memory."""
        runner = self._rounds.runner
        tokens = min(_CALIBRATION_TOKENS, runner.context_tokens - _CALIBRATION_DRAFTS)
        layout = runner.layout
        shape = layout.shape(tokens + _CALIBRATION_DRAFTS)
        buffer = KvBuffer(torch.zeros(shape, dtype=layout.torch_dtype, device=runner.device))
        buffer.length = tokens - 1
        greedy = TokenRule(SamplingParams(temperature=0.0), [], runner.vocab_size)
        found = []
        for _ in range(CALIBRATION_ROUNDS):
            self._rounds.round = MeanMs()
            self.draft([DraftWish(DraftState(greedy, [0] * tokens), _CALIBRATION_DRAFTS, buffer)])
            found.append(self._rounds.round)
        self._rounds.round = min(found[1:], key=lambda each: each.ms)

    def catch_up_ms(self, state: DraftState) -> float:
        """There is never anything to catch up with."""
        return 0.0

    def can_draft(self, wish: DraftWish) -> bool:
        """Whether the drafts fit behind the sequence's KV, which must be there."""
        buffer, tokens = wish.target_kv, len(wish.state.ids)
        return (
            buffer is not None
            and buffer.length == tokens - 1
            and tokens + wish.most <= min(buffer.capacity, self._rounds.runner.context_tokens)
        )

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """See :class:`~rakv_cluster.speculation.draft_rounds.ModelDrafter`."""
        running = [
            Running(
                wish,
                wish.target_kv,
                position=wish.target_kv.length,
                pending=wish.state.ids[-1:],
                ran=[],
            )
            if wish.target_kv is not None and self.can_draft(wish)
            else None
            for wish in wishes
        ]
        return self._rounds.draft(running)

    def close(self, state: DraftState) -> None:
        """Nothing is held."""
