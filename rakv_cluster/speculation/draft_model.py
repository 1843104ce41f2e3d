"""Drafts from a smaller model with the same vocabulary, for several sequences at once.

The draft model runs through the same primitive as the target and chooses by the same rule, with
the request's own seed, penalties and noise: so a draft is accepted exactly where both models
choose the same token, and a draft model equal to the target is always right.

Its KV follows the accepted tokens by comparison: what was computed for tokens that are still
there stays, everything behind the first difference is computed again in the next call's first
forward. That covers rejected drafts, the last draft of a block (which was guessed but never run),
steps without drafts, and prompts whose KV the target found in a store.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from rakv_cluster.clock import Clock
from rakv_cluster.errors import ConfigError
from rakv_cluster.kv.buffer import BufferPool, KvBuffer
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

CATCH_UP_ROWS = 512
"""Most tokens of one forward while a sequence is brought up to date."""

UNKNOWN_AGREEMENT = 0.4
"""Expected of a draft model that nobody has measured."""

_CALIBRATION_TOKENS = 64


def check_vocabulary(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> None:
    """Raise :class:`ConfigError` naming the first token id that the two do not agree on."""
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise ConfigError(
                f"the draft model has another vocabulary: id {index} is {theirs.get(index)!r}, "
                f"the model's is {ours.get(index)!r}",
                field="draft_model",
            )


class DraftModel:
    """The draft model of a replica, with KV of its own. Used by the engine thread only."""

    def __init__(
        self,
        runner: Runner,
        clock: Clock,
        *,
        kv_budget_bytes: int,
        vocab_size: int = 0,
        agreement: float = UNKNOWN_AGREEMENT,
    ) -> None:
        """``vocab_size`` is the target's, where padding makes it another than the runner's;
        ``agreement`` how often it is expected to say what the target says."""
        self.agreement = agreement
        self._runner = runner
        self._rounds = DraftRounds(runner, clock, vocab_size=vocab_size)
        self._clock = clock
        self._pool = BufferPool(runner.layout, budget_bytes=kv_budget_bytes, device=runner.device)
        self._lag_token = MeanMs()

    @property
    def round_ms(self) -> float:
        """Expected time of one more draft for every sequence that takes part."""
        return self._rounds.round.ms

    @property
    def leased_bytes(self) -> int:
        """KV memory of all sequences."""
        return self._pool.leased_bytes

    def calibrate(self) -> None:
        """Measure both costs on scratch memory."""
        greedy = TokenRule(SamplingParams(temperature=0.0), [], self._rounds.vocab_size)
        tokens = min(_CALIBRATION_TOKENS, self._runner.context_tokens - 5)
        rounds, lags = [], []
        for _ in range(CALIBRATION_ROUNDS):
            wish = DraftWish(DraftState(greedy, [0] * tokens), 4)
            self._rounds.round, self._lag_token = MeanMs(), MeanMs()
            if self.can_draft(wish):
                self.draft([wish])
            self.close(wish.state)
            rounds.append(self._rounds.round)
            lags.append(self._lag_token)
        self._rounds.round = min(rounds[1:], key=lambda each: each.ms)
        self._lag_token = min(lags[1:], key=lambda each: each.ms)

    def close(self, state: DraftState) -> None:
        """Free what a sequence holds."""
        state.computed.clear()
        if state.buffer is not None:
            self._pool.release(state.buffer)
            state.buffer = None

    def catch_up_ms(self, state: DraftState) -> float:
        """Expected time to run the accepted tokens without KV; the last one never has any."""
        lag_tokens = len(state.ids) - _agreement(state.computed, state.ids)
        return lag_tokens * self._lag_token.ms

    def can_draft(self, wish: DraftWish) -> bool:
        """Whether context and memory have room for so many drafts."""
        state = wish.state
        tokens = len(state.ids) + wish.most
        if not state.ids or tokens > self._runner.context_tokens:
            return False
        held = state.buffer.capacity if state.buffer is not None else 0
        return tokens <= held or self._pool.can_lease(tokens)

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """See :class:`~rakv_cluster.speculation.draft_rounds.ModelDrafter`.

        Nothing for a sequence that found no memory when its turn came.
        """
        running = [self._catch_up(wish) if self.can_draft(wish) else None for wish in wishes]
        return self._rounds.draft(running)

    def _catch_up(self, wish: DraftWish) -> Running:
        """Drop what was rejected and run all but the last few of the tokens that came instead."""
        state = wish.state
        del state.computed[_agreement(state.computed, state.ids) :]
        known = len(state.computed)
        running = Running(
            wish,
            self._room(state, wish.most),
            position=known,
            pending=state.ids[known:],
            ran=state.computed,
        )
        lag_tokens = len(running.pending) - 1
        if lag_tokens <= wish.most + 1:
            return running
        began_s = self._clock.monotonic_s()
        while len(running.pending) > 1:
            rows = min(len(running.pending) - 1, CATCH_UP_ROWS)
            self._rounds.forward([running], [running.pending[:rows]], wanted=False)
            del running.pending[:rows]
        ms = (self._clock.monotonic_s() - began_s) * 1e3
        self._lag_token.add(ms / lag_tokens)
        return running

    def _room(self, state: DraftState, drafts: int) -> KvBuffer:
        """The sequence's buffer with slots for ``drafts`` more tokens, moved if it was full."""
        tokens, old = len(state.ids) + drafts, state.buffer
        if old is not None and old.capacity >= tokens:
            return old
        new = self._pool.lease(tokens)
        if old is not None:
            count = len(state.computed)
            new.slots(0, count).copy_(old.slots(0, count))
            self._pool.release(old)
        state.buffer = new
        return new


def _agreement(computed: Sequence[int], ids: Sequence[int]) -> int:
    """Leading tokens of ``ids`` whose KV is there; the last of ``ids`` is always run again, for
    its logits."""
    count = min(len(computed), len(ids) - 1)
    if list(computed[:count]) == list(ids[:count]):
        return max(count, 0)
    return next(at for at in range(count) if computed[at] != ids[at])
