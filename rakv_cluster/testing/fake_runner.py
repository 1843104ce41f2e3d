"""A deterministic model without weights, whose output depends on every KV slot it should.

Fault contract of the fake: the KV of a token is a function of the whole prefix (read back from
the slot before it), and logits are a function of all slots up to the row's position. So KV of
another prefix, a stale slot, a missing or flipped value, or a slot that was never written changes
the tokens that come out. Arithmetic is on integers below 2**20, which float32 holds exactly: equal
inputs give equal tokens whatever the packing, and tests compare tokens without tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rakv_cluster.kv.layout import KvLayout, bits
from rakv_cluster.model.step import Step
from rakv_cluster.testing.clock import ManualClock

_PRIME = 1_048_573
_SPREAD = 7_919


class FakeRunner:
    """A :class:`rakv_cluster.model.step.Runner`. ``rows_seen`` lists the rows of each forward.

    With a ``clock``, a forward takes ``step_ms`` and ``row_ms`` for each row on it.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        context_tokens: int = 1024,
        clock: ManualClock | None = None,
        step_ms: float = 2.0,
        row_ms: float = 1.0,
    ) -> None:
        self._clock = clock
        self._step_ms = step_ms
        self._row_ms = row_ms
        self._layout = KvLayout(layers=2, kv_heads=1, head_dim=2, dtype="float32")
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self.rows_seen: list[int] = []
        cells = self._layout.layers * 2 * self._layout.kv_heads * self._layout.head_dim
        self._cell_offsets = (np.arange(cells, dtype=np.int64) * _SPREAD) % _PRIME

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, step: Step) -> torch.Tensor:
        """See :class:`rakv_cluster.model.step.Runner`."""
        token_ids, positions = step.token_ids.tolist(), step.positions.tolist()
        self.rows_seen.append(len(token_ids))
        if self._clock is not None:
            self._clock.advance((self._step_ms + self._row_ms * len(token_ids)) / 1e3)
        logits = torch.empty(len(step.logit_rows), self._vocab_size)
        wanted = {int(row): index for index, row in enumerate(step.logit_rows)}
        for span in step.spans:
            data = span.buffer.data
            for row in range(span.row_start, span.row_stop):
                position = positions[row]
                before = int(data[0, 0, 0, position - 1, 0]) if position else 1
                values = _kv(before, token_ids[row], position, self._cell_offsets)
                data[:, :, :, position] = torch.from_numpy(values).view(
                    self._layout.layers, 2, self._layout.kv_heads, self._layout.head_dim
                )
                if row in wanted:
                    slots = data[:, :, :, : position + 1].permute(3, 0, 1, 2, 4)
                    digest = _digest(bits(slots.contiguous()))
                    logits[wanted[row]] = self._logits(digest)
        return logits

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The greedy continuation, by the definition: no buffers, no cache."""
        ids = list(prompt)
        rows: list[np.ndarray] = []
        before = 1
        for position in range(len(prompt) + tokens - 1):
            rows.append(_kv(before, ids[position], position, self._cell_offsets))
            before = int(rows[-1][0])
            if position >= len(prompt) - 1:
                digest = _digest(np.stack(rows).view(np.uint32))
                ids.append(int(self._logits(digest).argmax()))
        return ids[len(prompt) :]

    def _logits(self, digest: int) -> torch.Tensor:
        columns = np.arange(self._vocab_size, dtype=np.int64)
        mixed = (digest * 31 + columns * 40_503 + (digest * columns) % 65_521) % 65_521
        return torch.from_numpy((mixed / 65_521 * 8).astype(np.float32))


def _kv(before: int, token_id: int, position: int, offsets: np.ndarray) -> np.ndarray:
    """The values of one slot, one per cell; the first is the state that the next slot reads."""
    state = (before * 48_271 + token_id * 16_807 + position * 69_621 + 12_345) % _PRIME
    return ((state + offsets) % _PRIME).astype(np.float32)


def _digest(raw: np.ndarray) -> int:
    """Of all bits of the slots, in order."""
    flat = raw.reshape(-1).astype(np.uint64)
    weights = np.arange(1, len(flat) + 1, dtype=np.uint64) * np.uint64(2_654_435_761)
    return int(((flat * weights) % np.uint64(2**31 - 1)).sum() % np.uint64(2**31 - 1))
