"""Which rows of a step attend together, and how: one policy per device and kind of numerics.

:func:`fast_groups` picks what is quickest on the CPU by rows and context; the same position may
round differently in steps of different shape. :func:`uniform_groups` (class
:class:`UniformGroups`) makes a row's bits depend on its position alone. :func:`sdpa_groups` works
on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.row_attention import (
    HeadShape,
    KvViews,
    Masked,
    OneRow,
    RowGroup,
    Sdpa,
    Split,
)
from rakv_cluster.model.step import Span

Grouping = Callable[[Sequence[Span], torch.Tensor, int], Iterator[RowGroup]]
"""``(spans, positions int64 [T] on the CPU, block_rows)`` to groups that cross no multiple of
``block_rows``."""

MASKED_ROWS = 32
"""Up to so many rows one masked call is quickest, from 64 on the split (docs/experiments.md)."""

SCATTERED_ROWS = 128
"""Scattered rows are cut into groups this large: keys end at the group's last position."""

CELL_TOKENS = 64
"""Uniform numerics: positions whose rows see the same number of keys. The capacities that a
:class:`rakv_cluster.kv.buffer.BufferPool` leases are multiples of it."""

ROW_MULTIPLE = 4
"""The flash kernel cuts rows into blocks; a last block of less than four takes another code path
and rounds differently."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one span within one block; ``positions`` int64 on the CPU."""

    buffer: KvBuffer
    row_start: int
    positions: torch.Tensor
    contiguous: bool

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.positions.shape[0]

    @property
    def rows(self) -> slice:
        """The rows in the step."""
        return slice(self.row_start, self.row_start + self.count)

    @property
    def first(self) -> int:
        """Position of the first row."""
        return int(self.positions[0])

    @property
    def stop(self) -> int:
        """One past the last row's position."""
        return int(self.positions[-1]) + 1

    def part(self, start: int, stop: int) -> Run:
        """Its rows ``[start, stop)``."""
        rows = self.positions[start:stop]
        return Run(self.buffer, self.row_start + start, rows, self.contiguous)

    def views(self, key_stop: int) -> KvViews:
        """The buffer's slots up to ``key_stop``, and the rows' own."""
        slots: slice | torch.Tensor = slice(self.first, self.stop)
        if not self.contiguous:
            slots = self.positions.to(self.buffer.data.device)
        return KvViews(self.buffer, slots, key_stop)


def fast_groups(shape: HeadShape) -> Grouping:
    """The quickest kernels on the CPU."""

    def group(run: Run) -> RowGroup:
        kv = run.views(run.stop)
        if run.count == 1:
            return OneRow(shape, run.row_start, kv)
        if run.contiguous and run.count > MASKED_ROWS:
            return Split(shape, run.rows, kv, run.first, None)
        # The first row's own slot stays under the mask: a softmax over no key is not a number.
        shared = 0 if run.count <= MASKED_ROWS else run.first
        mask = _hidden(run, shared, run.stop).repeat_interleave(shape.group, 0)
        if shared == 0:
            return Masked(shape, run.rows, kv, mask, mask.shape[0])
        return Split(shape, run.rows, kv, shared, mask)

    def groups(
        spans: Sequence[Span], positions: torch.Tensor, block_rows: int
    ) -> Iterator[RowGroup]:
        return map(group, _runs(spans, positions, block_rows, SCATTERED_ROWS))

    return groups


def sdpa_groups(shape: HeadShape) -> Grouping:
    """PyTorch's own choice of kernel, on any device."""

    def group(run: Run) -> RowGroup:
        unmasked = run.count == 1 or (run.contiguous and run.first == 0)
        mask = None if unmasked else _hidden(run, 0, run.stop)
        return Sdpa(shape, run.rows, run.views(run.stop), mask)

    def groups(
        spans: Sequence[Span], positions: torch.Tensor, block_rows: int
    ) -> Iterator[RowGroup]:
        return map(group, _runs(spans, positions, block_rows, block_rows))

    return groups


def uniform_groups(
    shape: HeadShape,
) -> Callable[[Sequence[Span], torch.Tensor, int], Iterator[Masked]]:
    """Rows whose bits depend on their own position and nothing else (CPU).

    The flash kernel gives a row the same bits whatever rows stand beside it, if their number is a
    multiple of :data:`ROW_MULTIPLE` and it is handed the same number of keys. So a row's keys
    always end at the next multiple of :data:`CELL_TOKENS` behind its position, the rest under a
    mask, and rows of different cells never share a call. A prefill in one pass or in any pieces,
    a step behind a reused prefix, verification and a batch then agree bit for bit, for about a
    tenth more attention time; :mod:`rakv_cluster.model.numerics` tests it at load.
    """
    masks = _CellMasks(shape.group)

    def group(cell: Run) -> Masked:
        key_stop = min((cell.first // CELL_TOKENS + 1) * CELL_TOKENS, cell.buffer.capacity)
        mask = masks.of(cell, key_stop)
        missing = -mask.shape[0] % ROW_MULTIPLE
        if missing:
            mask = torch.cat([mask, mask[-1:].expand(missing, key_stop)])
        return Masked(shape, cell.rows, cell.views(key_stop), mask, mask.shape[0])

    def groups(spans: Sequence[Span], positions: torch.Tensor, block_rows: int) -> Iterator[Masked]:
        for run in _runs(spans, positions, block_rows, block_rows):
            yield from map(group, _cells(run))

    return groups


class _CellMasks:
    """Every cell's mask is a triangle behind zeros: one table, cut from its end, serves all."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._table = torch.empty(0, 0)

    def of(self, cell: Run, key_stop: int) -> torch.Tensor:
        """Additive ``[rows * group, key_stop]``, a view where the cell's rows are contiguous."""
        table = self._ending_at(key_stop, cell.buffer.data.dtype)
        offsets = cell.positions % CELL_TOKENS
        if cell.contiguous:
            start = int(offsets[0]) * self._group
            return table[start : start + cell.count * self._group]
        return table.view(CELL_TOKENS, self._group, key_stop)[offsets].flatten(0, 1)

    def _ending_at(self, keys: int, dtype: torch.dtype) -> torch.Tensor:
        width = -(-keys // CELL_TOKENS) * CELL_TOKENS
        if self._table.shape[1] < width or self._table.dtype != dtype:
            hidden = torch.ones(CELL_TOKENS, CELL_TOKENS, dtype=torch.bool).triu_(1)
            size = max(width, 2 * self._table.shape[1])
            self._table = torch.zeros(CELL_TOKENS * self._group, size, dtype=dtype)
            triangle = self._table[:, -CELL_TOKENS:]
            triangle.masked_fill_(hidden.repeat_interleave(self._group, 0), float("-inf"))
        start = self._table.shape[1] - width
        return self._table[:, start : start + keys]


def _runs(
    spans: Sequence[Span], positions: torch.Tensor, block_rows: int, scattered_rows: int
) -> Iterator[Run]:
    """Runs that cross no multiple of ``block_rows``; scattered ones of ``scattered_rows`` rows."""
    for span in spans:
        rows = span.row_stop - span.row_start
        contiguous = span.last_position - span.first_position == rows - 1
        start = span.row_start
        while start < span.row_stop:
            stop = min((start // block_rows + 1) * block_rows, span.row_stop)
            if not contiguous:
                stop = min(stop, start + scattered_rows)
            yield Run(span.buffer, start, positions[start:stop], contiguous)
            start = stop


def _cells(run: Run) -> Iterator[Run]:
    """Cut a run where its positions enter another cell."""
    if run.first // CELL_TOKENS == (run.stop - 1) // CELL_TOKENS:
        yield run
        return
    _, counts = torch.unique_consecutive(run.positions // CELL_TOKENS, return_counts=True)
    start = 0
    for count in counts.tolist():
        yield run.part(start, start + count)
        start += count


def _hidden(run: Run, start: int, stop: int) -> torch.Tensor:
    """Additive ``[rows, stop - start]``: -inf where a slot lies behind a row's position."""
    hidden = torch.arange(start, stop) > run.positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=run.buffer.data.dtype)
    return mask.masked_fill_(hidden, float("-inf")).to(run.buffer.data.device)
