"""Attention of packed rows over their sequences' own buffers, for the fused decoder.

A step's rows are cut into :class:`RowGroup` s once; every layer then runs the same groups. On the
CPU no dense ``rows x keys`` mask is built for long runs of contiguous rows: the keys that all rows
of a group see need none, the triangle on top is the kernel's own causal mode, and both results are
merged by their log-sum-exp. The query heads that share a KV head are folded into rows, which makes
fewer and larger products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.step import Span


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows ``[row_start, row_stop)`` of a step, all of one sequence, that attend together.

    Their K/V go to ``slots``. Every row sees slots ``[0, shared_keys)``. Of the slots
    ``[shared_keys, key_stop)`` row ``i`` sees the first ``i + 1`` where ``mask`` is None, else
    those where its mask is 0 and not -inf.
    """

    buffer: KvBuffer
    row_start: int
    row_stop: int
    slots: slice | torch.Tensor
    shared_keys: int
    key_stop: int
    mask: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_stop - self.row_start


class Attention(Protocol):
    """A device's way to attend."""

    def groups(
        self, spans: Sequence[Span], positions: torch.Tensor, block_rows: int
    ) -> list[RowGroup]:
        """Cut spans into groups; none crosses a multiple of ``block_rows``.

        ``positions`` are the step's, int64 ``[T]`` on the CPU.
        """
        ...

    def attend(self, queries: torch.Tensor, group: RowGroup, layer: int, out: torch.Tensor) -> None:
        """Write the attention of ``queries`` ``[rows, heads, head_dim]`` into ``out`` (equal
        shape, contiguous). The group's K/V must be in its buffer already."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one span that a block holds; ``positions`` int64 on the CPU."""

    buffer: KvBuffer
    row_start: int
    row_stop: int
    positions: torch.Tensor
    contiguous: bool

    @property
    def first(self) -> int:
        """Position of the first row."""
        return int(self.positions[0])

    @property
    def key_stop(self) -> int:
        """One past the last row's position."""
        return int(self.positions[-1]) + 1

    def group(
        self, *, shared_keys: int, key_stop: int, mask: torch.Tensor | None = None
    ) -> RowGroup:
        """The run as a group."""
        slots: slice | torch.Tensor = slice(self.first, self.key_stop)
        if not self.contiguous:
            slots = self.positions.to(self.buffer.data.device)
        return RowGroup(
            self.buffer, self.row_start, self.row_stop, slots, shared_keys, key_stop, mask
        )


def cut_runs(
    spans: Sequence[Span], positions: torch.Tensor, block_rows: int, scattered_rows: int
) -> list[Run]:
    """Runs that cross no multiple of ``block_rows``, scattered ones none of ``scattered_rows``."""
    runs: list[Run] = []
    for span in spans:
        rows = span.row_stop - span.row_start
        contiguous = span.last_position - span.first_position == rows - 1
        limit = block_rows if contiguous else min(block_rows, scattered_rows)
        start = span.row_start
        while start < span.row_stop:
            # a scattered limit restarts at each block, so that no run lies in two of them
            block_end = (start // block_rows + 1) * block_rows
            stop = min(start + limit, block_end, span.row_stop)
            runs.append(Run(span.buffer, start, stop, positions[start:stop], contiguous))
            start = stop
    return runs


def hidden_mask(positions: torch.Tensor, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Additive ``[rows, stop - start]``: -inf where a slot lies behind a row's position."""
    hidden = torch.arange(start, stop) > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
    return mask.to(like.device)


class CpuAttention:
    """PyTorch's CPU flash kernel, called so that it reports the log-sum-exp.

    Measured (SmolLM2, 2 threads; docs/experiments.md): folding wins 3-25%, the split wins from
    about 64 rows on (up to 15% behind a long prefix), one masked call below.
    """

    masked_rows = 32
    """Groups of up to so many rows take one call with a mask over all their keys."""

    scattered_rows = 128
    """Scattered rows are cut into groups this large: keys end at the group's last position."""

    def __init__(self, heads: int, kv_heads: int, scale: float) -> None:
        self._kv_heads = kv_heads
        self._group_heads = heads // kv_heads
        self._scale = scale

    def groups(
        self, spans: Sequence[Span], positions: torch.Tensor, block_rows: int
    ) -> list[RowGroup]:
        """See :class:`Attention`."""
        runs = cut_runs(spans, positions, block_rows, self.scattered_rows)
        return [self._group(run) for run in runs]

    def _group(self, run: Run) -> RowGroup:
        rows = run.row_stop - run.row_start
        if rows == 1:
            return run.group(shared_keys=run.key_stop, key_stop=run.key_stop)
        if run.contiguous and rows > self.masked_rows:
            return run.group(shared_keys=run.first, key_stop=run.key_stop)
        # The first row's own slot stays in the masked part: softmax over no key is not a number.
        shared = 0 if rows <= self.masked_rows else run.first
        mask = hidden_mask(run.positions, shared, run.key_stop, run.buffer.data)
        mask = mask.repeat_interleave(self._group_heads, 0)
        return run.group(shared_keys=shared, key_stop=run.key_stop, mask=mask)

    def attend(self, queries: torch.Tensor, group: RowGroup, layer: int, out: torch.Tensor) -> None:
        """See :class:`Attention`."""
        kv = group.buffer.data[layer]
        if group.rows == 1 and kv.dtype == torch.float32:
            self._one_row(queries, kv, group.key_stop, out)
            return
        rows, _, dim = queries.shape
        q = queries.view(rows, self._kv_heads, self._group_heads, dim)
        result = out.view(q.shape)
        if group.shared_keys in {0, group.key_stop}:
            causal = group.rows > 1
            attended, _ = self._part(q, kv[:, :, : group.key_stop], group.mask, causal=causal)
            result.copy_(attended)
            return
        shared, shared_lse = self._part(q, kv[:, :, : group.shared_keys], None, causal=False)
        above = kv[:, :, group.shared_keys : group.key_stop]
        rest, rest_lse = self._part(q, above, group.mask, causal=True)
        # softmax over both parts: their outputs, weighted by their shares of the exponential sum
        share = torch.sigmoid(rest_lse - shared_lse).unsqueeze(-1).to(out.dtype)
        torch.lerp(shared, rest, share, out=result)

    def _one_row(self, q: torch.Tensor, kv: torch.Tensor, keys: int, out: torch.Tensor) -> None:
        """A single row needs no mask; two products and a softmax beat the flash kernel."""
        folded = (self._kv_heads, -1, q.shape[-1])
        k, v = kv[:, :, :keys]
        scores = torch.bmm(q.view(folded), k.transpose(1, 2)).mul_(self._scale)
        torch.bmm(torch.softmax(scores, -1), v, out=out.view(folded))

    def _part(
        self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over ``kv`` ``[2, kv_heads, keys, head_dim]`` and its log-sum-exp.

        ``q`` is ``[rows, kv_heads, group, head_dim]``, and so is the result, as views. A causal
        triangle needs one row per position, so only the other cases fold heads into rows, and
        their masks have a row per folded row.
        """
        rows, kv_heads, group, dim = q.shape
        k, v = kv.unsqueeze(1)
        if causal and mask is None:
            unfolded = q.flatten(1, 2).transpose(0, 1)[None]
            attended, lse = flash(unfolded, k, v, is_causal=True, scale=self._scale)
            attended = attended[0].transpose(0, 1).view(rows, kv_heads, group, dim)
            return attended, lse[0].t().reshape(rows, kv_heads, group)
        folded = q.permute(1, 0, 2, 3).reshape(1, kv_heads, rows * group, dim)
        attended, lse = flash(folded, k, v, attn_mask=mask, scale=self._scale)
        attended = attended.view(kv_heads, rows, group, dim).transpose(0, 1)
        return attended, lse.view(kv_heads, rows, group).transpose(0, 1)


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel behind ``F.scaled_dot_product_attention``, which drops the log-sum-exp."""
    attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return attended, lse


class SdpaAttention:
    """``F.scaled_dot_product_attention`` per group, on any device."""

    def __init__(self, heads: int, kv_heads: int, scale: float) -> None:
        self._kv_heads = kv_heads
        self._group_heads = heads // kv_heads
        self._scale = scale

    def groups(
        self, spans: Sequence[Span], positions: torch.Tensor, block_rows: int
    ) -> list[RowGroup]:
        """See :class:`Attention`."""
        groups = []
        for run in cut_runs(spans, positions, block_rows, block_rows):
            single = run.row_stop - run.row_start == 1
            triangle = run.contiguous and run.first == 0
            mask = None
            if not single and not triangle:
                mask = hidden_mask(run.positions, 0, run.key_stop, run.buffer.data)
            shared = run.key_stop if single else 0
            groups.append(run.group(shared_keys=shared, key_stop=run.key_stop, mask=mask))
        return groups

    def attend(self, queries: torch.Tensor, group: RowGroup, layer: int, out: torch.Tensor) -> None:
        """See :class:`Attention`."""
        k, v = group.buffer.data[layer, :, :, : group.key_stop].unsqueeze(1)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            k,
            v,
            attn_mask=group.mask,
            is_causal=group.mask is None and group.rows > 1,
            scale=self._scale,
            enable_gqa=self._group_heads > 1,
        )
        out.copy_(attended[0].transpose(0, 1))
