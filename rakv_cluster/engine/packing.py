"""Rows of a step, in arrays that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.model.step import Span, Step


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
        self._all_positions = torch.arange(context_tokens, dtype=torch.int64).numpy()

    def pack(self, parts: Many[tuple[Sequence, int]]) -> Step:
        """The next ``tokens`` tokens of each sequence behind its verified KV.

        Logits are asked for where that reaches the sequence's last known token.
        """
        row, wanted = 0, 0
        spans: list[Span] = []
        for sequence, tokens in parts:
            buffer = sequence.buffer
            if buffer is None:
                raise ValueError(f"request {sequence.request.request_id} has no KV buffer")
            first, stop = buffer.length, buffer.length + tokens
            self._tokens_view[row : row + tokens] = sequence.ids[first:stop]
            self._positions_view[row : row + tokens] = self._all_positions[first:stop]
            spans.append(Span(buffer, row, row + tokens, first, stop - 1))
            row += tokens
            if stop == sequence.count:
                self._rows_view[wanted] = row - 1
                wanted += 1
        return Step(
            token_ids=self._token_ids[:row],
            positions=self._positions[:row],
            spans=tuple(spans),
            logit_rows=self._logit_rows[:wanted],
        )
