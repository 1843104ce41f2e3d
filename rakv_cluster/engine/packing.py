"""Rows of a step, in arrays that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.model.step import Span, Step


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's rows in a step: its next ``tokens`` known tokens, then ``drafts`` to verify.

    Only a part that reaches the last known token has drafts.
    """

    sequence: Sequence
    tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return self.tokens + len(self.drafts)

    @property
    def choices(self) -> int:
        """Rows whose logits choose a token: from the last known token on."""
        if self.sequence.probing or self.tokens < self.sequence.remaining:
            return 0
        return 1 + len(self.drafts)

    @property
    def scattered(self) -> bool:
        """Whether its tokens do not simply follow each other."""
        return len(self.sequence.to_compute) > 0

    @property
    def plain(self) -> Part:
        """The same without drafts."""
        return Part(self.sequence, self.tokens)


class StepPacker:
    """Packs sequences' next tokens into a :class:`Step`.

    The step's tensors are views of buffers that the next call overwrites.
    """

    def __init__(self, max_tokens: int, context_tokens: int) -> None:
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64)
        self._logit_rows = torch.zeros(max_tokens, dtype=torch.int64)
        self._tokens_view = self._token_ids.numpy()
        self._positions_view = self._positions.numpy()
        self._rows_view = self._logit_rows.numpy()
        # Positions, and row numbers too.
        longest = max(context_tokens, max_tokens)
        self._all_positions = torch.arange(longest, dtype=torch.int64).numpy()

    def pack(self, parts: Many[Part]) -> Step:
        """Each part's tokens behind its sequence's verified KV, and the logits that choose."""
        row, wanted = 0, 0
        spans: list[Span] = []
        for part in parts:
            sequence, buffer = part.sequence, part.sequence.buffer
            if buffer is None:
                raise ValueError(f"request {sequence.request.request_id} has no KV buffer")
            known, end = row + part.tokens, row + part.rows
            if len(sequence.to_compute):
                positions = sequence.to_compute[: part.tokens]
            else:
                positions = self._all_positions[buffer.length : buffer.length + part.rows]
            self._tokens_view[row:known] = sequence.ids[positions[: part.tokens]]
            if part.drafts:
                self._tokens_view[known:end] = part.drafts
            self._positions_view[row:end] = positions
            first, last = int(positions[0]), int(positions[-1])
            spans.append(Span(buffer, row, end, first, last, sequence.watch, sequence.drift))
            choices = part.choices
            self._rows_view[wanted : wanted + choices] = self._all_positions[end - choices : end]
            wanted += choices
            row = end
        return Step(
            token_ids=self._token_ids[:row],
            positions=self._positions[:row],
            spans=tuple(spans),
            logit_rows=self._logit_rows[:wanted],
        )
