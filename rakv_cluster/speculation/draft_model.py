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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from rakv_cluster.clock import Clock
from rakv_cluster.errors import ConfigError
from rakv_cluster.kv.buffer import BufferPool, KvBuffer
from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.types import SamplingParams

CATCH_UP_ROWS = 512
"""Most tokens of one forward while a sequence is brought up to date."""

UNKNOWN_AGREEMENT = 0.4
"""Expected of a draft model that nobody has measured."""

_MS_GAIN = 0.1
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


@dataclass(slots=True, eq=False)
class DraftState:
    """One sequence in the draft model.

    ``ids`` are its accepted tokens. ``computed`` are the tokens whose KV stands in ``buffer``:
    drafts among them may have been rejected since.
    """

    rule: TokenRule
    ids: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    buffer: KvBuffer | None = None

    @property
    def lag_tokens(self) -> int:
        """Accepted tokens without KV; the last one never has any."""
        return len(self.ids) - _agreement(self.computed, self.ids)


@dataclass(frozen=True, slots=True)
class DraftWish:
    """So many drafts (at least one) for one sequence."""

    state: DraftState
    drafts: int


@dataclass(slots=True)
class _Running:
    """A sequence while it drafts: ``pending`` tokens are to be run, the last one's logits say the
    next draft."""

    wish: DraftWish
    buffer: KvBuffer
    pending: list[int]
    drafted: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the first pending token stands."""
        return len(self.wish.state.computed)


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
        self._runner = runner
        self.agreement = agreement
        self._vocab_size = vocab_size or runner.vocab_size
        self._clock = clock
        self._pool = BufferPool(runner.layout, budget_bytes=kv_budget_bytes, device=runner.device)
        self.round_ms = 0.0
        """Expected time of one more draft for every sequence that takes part."""
        self.lag_token_ms = 0.0
        """Expected time to catch up by one token."""

    @property
    def leased_bytes(self) -> int:
        """KV memory of all sequences."""
        return self._pool.leased_bytes

    def calibrate(self) -> None:
        """Measure both costs on scratch memory; the first of three rounds does not count."""
        greedy = TokenRule(SamplingParams(temperature=0.0), [], self._vocab_size)
        tokens = min(_CALIBRATION_TOKENS, self._runner.context_tokens - 5)
        for _ in range(3):
            state = DraftState(greedy, [0] * tokens)
            self.round_ms = self.lag_token_ms = 0.0
            if self.can_draft(state, 4):
                self.draft([DraftWish(state, 4)])
            self.close(state)

    def close(self, state: DraftState) -> None:
        """Free what a sequence holds."""
        state.computed.clear()
        if state.buffer is not None:
            self._pool.release(state.buffer)
            state.buffer = None

    def can_draft(self, state: DraftState, drafts: int) -> bool:
        """Whether context and memory have room for so many drafts."""
        tokens = len(state.ids) + drafts
        if not state.ids or tokens > self._runner.context_tokens:
            return False
        held = state.buffer.capacity if state.buffer is not None else 0
        return tokens <= held or self._pool.can_lease(tokens)

    def draft(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        """What each sequence's next tokens would be by this model; one forward a draft for all.

        Nothing for a sequence that found no memory when its turn came. Raises what the model
        raises.
        """
        running = [
            self._catch_up(wish) if self.can_draft(wish.state, wish.drafts) else None
            for wish in wishes
        ]
        active = [each for each in running if each is not None]
        if active:
            self._rounds(active)
        return [() if each is None else tuple(each.drafted) for each in running]

    def _rounds(self, running: Sequence[_Running]) -> None:
        """Draft until every sequence has what it wishes."""
        began_s = self._clock.monotonic_s()
        self._round(running)  # what is behind the last known tokens comes with this forward
        first_s = self._clock.monotonic_s()
        rounds = max(each.wish.drafts for each in running)
        for _ in range(1, rounds):
            self._round([each for each in running if len(each.drafted) < each.wish.drafts])
        ended_s = self._clock.monotonic_s()
        round_ms = (ended_s - first_s) * 1e3 / (rounds - 1) if rounds > 1 else 0.0
        self.round_ms = _moved(self.round_ms, round_ms or (first_s - began_s) * 1e3)

    def _catch_up(self, wish: DraftWish) -> _Running:
        """Drop what was rejected and run all but the last few of the tokens that came instead."""
        state = wish.state
        del state.computed[_agreement(state.computed, state.ids) :]
        pending = state.ids[len(state.computed) :]
        running = _Running(wish, self._room(state, wish.drafts), pending)
        if len(pending) <= wish.drafts + 2:
            return running
        began_s = self._clock.monotonic_s()
        caught_up = len(pending) - 1
        while len(running.pending) > 1:
            rows = min(len(running.pending) - 1, CATCH_UP_ROWS)
            self._forward([running], [running.pending[:rows]], wanted=False)
            del running.pending[:rows]
        ms = (self._clock.monotonic_s() - began_s) * 1e3
        self.lag_token_ms = _moved(self.lag_token_ms, ms / caught_up)
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

    def _round(self, running: Sequence[_Running]) -> None:
        """Run everything pending and take one draft of each sequence."""
        logits = self._forward(running, [each.pending for each in running], wanted=True)
        missing = self._vocab_size - logits.shape[1]  # columns of padding, more or fewer
        logits = functional.pad(logits, (0, missing), value=-math.inf) if missing else logits
        rows = [
            RuleRow(
                each.wish.state.rule,
                position=len(each.wish.state.ids) + len(each.drafted),
                pending=tuple(each.drafted),
            )
            for each in running
        ]
        for each, choice in zip(running, choose(logits, rows), strict=True):
            each.drafted.append(choice.token_id)
            each.pending = [choice.token_id]

    def _forward(
        self, running: Sequence[_Running], tokens: Sequence[Sequence[int]], *, wanted: bool
    ) -> torch.Tensor:
        """Run ``tokens`` of each sequence; logits of each one's last if ``wanted``, else none."""
        spans, positions, last_rows, row = [], [], [], 0
        for each, mine in zip(running, tokens, strict=True):
            first, stop = each.position, row + len(mine)
            spans.append(Span(each.buffer, row, stop, first, first + len(mine) - 1))
            positions.append(torch.arange(first, first + len(mine)))
            last_rows.append(stop - 1)
            row = stop
        logits = self._runner.forward(
            Step(
                token_ids=torch.tensor([token for mine in tokens for token in mine]),
                positions=torch.cat(positions),
                spans=tuple(spans),
                logit_rows=torch.tensor(last_rows if wanted else [], dtype=torch.int64),
            )
        )
        for each, mine in zip(running, tokens, strict=True):
            each.wish.state.computed.extend(mine)
        return logits


def _agreement(computed: Sequence[int], ids: Sequence[int]) -> int:
    """Leading tokens of ``ids`` whose KV is there; the last of ``ids`` is always run again, for
    its logits."""
    count = min(len(computed), len(ids) - 1)
    if list(computed[:count]) == list(ids[:count]):
        return max(count, 0)
    return next(at for at in range(count) if computed[at] != ids[at])


def _moved(mean_ms: float, ms: float) -> float:
    return ms if mean_ms == 0 else mean_ms + _MS_GAIN * (ms - mean_ms)
