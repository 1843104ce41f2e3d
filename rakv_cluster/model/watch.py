"""What rows of a step attend to, for whoever wants to know: a blended prompt's question, say.

Attention kernels do not give their weights away; a watch computes them once more for few rows of
few layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_PIECE_ROWS = 16
"""Rows whose weights are in memory together: heads x rows x slots floats."""


class AttentionWatch:
    """Sees what rows at positions from ``first_position`` on attend to in ``layers``.

    The weight of a slot is the largest over heads, the mean over rows and layers. ``rows`` counts
    rows seen, in each layer.
    """

    def __init__(self, layers: Iterable[int], first_position: int = 0) -> None:
        self.layers = frozenset(layers)
        self.first_position = first_position
        self.rows = 0
        self._sums = torch.zeros(0)

    def observe(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> None:
        """Add the attention of ``queries`` ``[heads, rows, head_dim]`` or ``[kv_heads, group, rows,
        head_dim]`` (rotated) at ``positions`` ``[rows]`` (ascending) to the slots of ``keys``
        ``[kv_heads, slots, head_dim]`` up to each one's own; in a sliding-window layer to the last
        ``window`` of them."""
        wanted = positions >= self.first_position
        rows, queries = positions[wanted], queries[..., wanted, :].flatten(0, -3)
        scale = queries.shape[2] ** -0.5 if scaling is None else scaling
        for start in range(0, len(rows), _PIECE_ROWS):
            piece = slice(start, start + _PIECE_ROWS)
            self._observe(queries[:, piece].float() * scale, keys, rows[piece], window)

    def _observe(
        self, queries: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, window: int | None
    ) -> None:
        stop = int(rows[-1]) + 1
        # Without a window all rows see what stands before the first of them.
        first = int(rows[0]) if window is None else 0
        slots = torch.arange(first, stop, device=rows.device)
        hidden = slots > rows[:, None]
        if window is not None:
            hidden |= slots <= rows[:, None] - window
        heads, count, size = queries.shape
        folded = queries.reshape(keys.shape[0], -1, size)
        scores = folded @ keys[:, :stop].float().transpose(1, 2)
        scores = scores.view(heads, count, stop)
        scores[..., first:].masked_fill_(hidden, float("-inf"))
        self._reserve(stop, scores.device)
        self._sums[:stop] += scores.softmax(-1).amax(0).sum(0)
        self.rows += count

    def figures(self, slots: int) -> torch.Tensor:
        """What was seen of slots ``[0, slots)``: float32 on the CPU, 0 where nothing was."""
        self._reserve(slots, self._sums.device)
        return self._sums[:slots].cpu() / max(self.rows, 1)

    def _reserve(self, slots: int, device: torch.device) -> None:
        if len(self._sums) < slots:
            longer = torch.zeros(slots, device=device)
            longer[: len(self._sums)] = self._sums
            self._sums = longer


UNWATCHED = AttentionWatch(())
"""Sees nothing."""
