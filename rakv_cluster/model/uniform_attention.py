"""CPU attention whose bits depend on a row's own position and nothing else.

PyTorch's flash kernel gives a row the same bits whatever rows stand beside it, if their number is
a multiple of four and it is handed the same number of keys. So here a row's keys always end at the
next multiple of :data:`CELL_TOKENS` behind its position, the rest hidden by a mask; rows of
different cells never share a call. Prefill in one pass or in any pieces, a step behind a reused
prefix, verification and a batch then agree bit for bit, at about a tenth more attention time.
:mod:`rakv_cluster.model.numerics` measures at load whether that holds on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rakv_cluster.model.row_attention import RowGroup, Run, cut_runs, flash
from rakv_cluster.model.step import Span

CELL_TOKENS = 64
"""Positions whose rows see the same number of keys. Leases of KvBuffer are a multiple of it."""

_ROW_MULTIPLE = 4
"""The kernel cuts rows into blocks; a last block of less than four takes another code path."""


class UniformCpuAttention:
    """See the module; an :class:`rakv_cluster.model.row_attention.Attention`."""

    def __init__(self, heads: int, kv_heads: int, scale: float) -> None:
        self._kv_heads = kv_heads
        self._group_heads = heads // kv_heads
        self._scale = scale
        self._mask = torch.empty(0, 0)

    def groups(
        self, spans: Sequence[Span], positions: torch.Tensor, block_rows: int
    ) -> list[RowGroup]:
        """See :class:`rakv_cluster.model.row_attention.Attention`."""
        runs = cut_runs(spans, positions, block_rows, block_rows)
        return [self._group(cell) for run in runs for cell in _cells(run)]

    def _group(self, run: Run) -> RowGroup:
        cell = run.first // CELL_TOKENS
        key_stop = min((cell + 1) * CELL_TOKENS, run.buffer.capacity)
        mask = self._cell_mask(key_stop, run.buffer.data.dtype)
        if run.contiguous:
            start = (run.first - cell * CELL_TOKENS) * self._group_heads
            mask = mask[start : start + len(run.positions) * self._group_heads]
        else:
            mask = mask.view(CELL_TOKENS, self._group_heads, -1)
            mask = mask[run.positions - cell * CELL_TOKENS].flatten(0, 1)
        return run.group(shared_keys=0, key_stop=key_stop, mask=_whole_rows(mask))

    def _cell_mask(self, keys: int, dtype: torch.dtype) -> torch.Tensor:
        """``[CELL_TOKENS * group_heads, keys]`` for a cell whose keys end at ``keys``, a view.

        Every cell's mask is a triangle behind zeros: one table, cut from its end, serves all.
        """
        cell_keys = -(-keys // CELL_TOKENS) * CELL_TOKENS
        if self._mask.shape[1] < cell_keys or self._mask.dtype != dtype:
            width = max(cell_keys, 2 * self._mask.shape[1])
            hidden = torch.ones(CELL_TOKENS, CELL_TOKENS, dtype=torch.bool).triu_(1)
            triangle = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            mask = torch.zeros(CELL_TOKENS * self._group_heads, width, dtype=dtype)
            mask[:, -CELL_TOKENS:] = triangle.repeat_interleave(self._group_heads, 0)
            self._mask = mask
        start = self._mask.shape[1] - cell_keys
        return self._mask[:, start : start + keys]

    def attend(self, queries: torch.Tensor, group: RowGroup, layer: int, out: torch.Tensor) -> None:
        """See :class:`rakv_cluster.model.row_attention.Attention`."""
        rows, _, dim = queries.shape
        q = queries.view(rows, self._kv_heads, self._group_heads, dim).transpose(0, 1)
        folded = _whole_rows(q.flatten(1, 2).transpose(0, 1)).transpose(0, 1)[None]
        k, v = group.buffer.data[layer, :, :, : group.key_stop].unsqueeze(1)
        attended, _ = flash(folded, k, v, attn_mask=group.mask, scale=self._scale)
        attended = attended[0, :, : rows * self._group_heads]
        attended = attended.view(self._kv_heads, rows, self._group_heads, dim)
        out.view(rows, self._kv_heads, self._group_heads, dim).copy_(attended.transpose(0, 1))


def _cells(run: Run) -> Iterator[Run]:
    """Cut a run where its positions enter another cell."""
    counts = torch.unique_consecutive(run.positions // CELL_TOKENS, return_counts=True)[1]
    start = 0
    for count in counts.tolist():
        stop = start + count
        yield Run(
            run.buffer,
            run.row_start + start,
            run.row_start + stop,
            run.positions[start:stop],
            run.contiguous,
        )
        start = stop


def _whole_rows(values: torch.Tensor) -> torch.Tensor:
    """``values`` with its last row repeated up to a multiple of :data:`_ROW_MULTIPLE`."""
    missing = -len(values) % _ROW_MULTIPLE
    if missing == 0:
        return values
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])
