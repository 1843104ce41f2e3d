"""Attention of one group of rows over its sequence's own buffer, for the fused decoder.

A group is prepared once per step (views of every layer's slots, mask, scratch) and then runs in
every layer, so that a layer costs a handful of kernel calls and hardly a Python object. Which
rows form a group, and of which kind, is decided in :mod:`rakv_cluster.model.row_groups`.

The query heads that share a KV head are folded into rows (``[rows, heads, head_dim]`` becomes
``[kv_heads, rows * group, head_dim]``): fewer and larger products, and K and V are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from rakv_cluster.kv.buffer import KvBuffer

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The CPU kernel behind ``F.scaled_dot_product_attention``, which drops the log-sum-exp."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, KV heads they share in consecutive groups, and the scale of their products."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class RowGroup(Protocol):
    """Rows ``[row_start, row_stop)`` of a step, all of one sequence, that attend together."""

    @property
    def row_start(self) -> int:
        """First row in the step."""
        ...

    @property
    def row_stop(self) -> int:
        """One past the last row."""
        ...

    @property
    def kv(self) -> KvViews:
        """Where the rows' K/V go and what they attend to."""
        ...

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of ``queries`` ``[rows, heads, head_dim]`` into ``out`` (equal
        shape, contiguous). The rows' own K/V must have been stored."""
        ...


class KvViews:
    """Views of a buffer in every layer, made once per step: ``[1, kv_heads, slots, head_dim]``, the
    batch of one that the kernels want."""

    def __init__(self, buffer: KvBuffer, slots: slice | torch.Tensor, key_stop: int) -> None:
        """``slots`` are the rows' own; keys and values are the slots ``[0, key_stop)``."""
        by_layer = buffer.data.flatten(0, 1)[:, None, :, :key_stop].unbind(0)
        self.keys = by_layer[0::2]
        self.values = by_layer[1::2]
        self._slots = slots
        if isinstance(slots, slice):
            self._stores = buffer.data[:, :, :, slots].unbind(0)
        else:
            self._stores = buffer.data.unbind(0)

    def store(self, layer: int, rows: torch.Tensor) -> None:
        """Write K and V ``[2, kv_heads, rows, head_dim]`` into the rows' slots."""
        if isinstance(self._slots, slice):
            self._stores[layer].copy_(rows)
        else:
            self._stores[layer].index_copy_(2, self._slots, rows)


class OneRow:
    """A single row sees every key: two products and a softmax, no mask."""

    def __init__(self, shape: HeadShape, row: int, kv: KvViews) -> None:
        self.row_start, self.row_stop, self.kv = row, row + 1, kv
        self._folded = (shape.kv_heads, shape.group, shape.head_dim)
        self._scale = shape.scale
        self._zero = kv.keys[0].new_zeros(1, 1, 1)

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`RowGroup`."""
        q, k = queries.view(self._folded), self.kv.keys[layer][0].transpose(1, 2)
        scores = torch.baddbmm(self._zero, q, k, beta=0, alpha=self._scale)
        weights = torch.softmax(scores, -1)
        torch.bmm(weights, self.kv.values[layer][0], out=out.view(self._folded))


class Masked:
    """Rows with one additive mask over all keys."""

    def __init__(
        self, shape: HeadShape, rows: slice, kv: KvViews, mask: torch.Tensor, padded: int
    ) -> None:
        """``mask`` is ``[padded, keys]`` for folded rows; those from ``rows * group`` on are
        computed and thrown away. ``queries`` ``[1, kv_heads, padded, head_dim]`` is scratch."""
        self.row_start, self.row_stop, self.kv = rows.start, rows.stop, kv
        self._mask, self._scale = mask, shape.scale
        count = rows.stop - rows.start
        self._split = (shape.kv_heads, count, shape.group, shape.head_dim)
        self._folded_rows = count * shape.group
        self.queries = mask.new_zeros(1, shape.kv_heads, padded, shape.head_dim)
        self._target = self.queries[0, :, : self._folded_rows].view(self._split).transpose(0, 1)

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`RowGroup`."""
        self._target.copy_(queries.view(self._target.shape))
        attended = self.attended(layer)[0, :, : self._folded_rows]
        out.view(self._target.shape).copy_(attended.view(self._split).transpose(0, 1))

    def attended(self, layer: int) -> torch.Tensor:
        """Attention of what stands in ``queries``, folded like it."""
        k, v = self.kv.keys[layer], self.kv.values[layer]
        return flash(self.queries, k, v, attn_mask=self._mask, scale=self._scale)[0]


class Split:
    """Many rows behind ``shared`` slots that all of them see.

    The shared slots need no mask, the rest is the kernel's own causal triangle (or has a small
    mask, for scattered rows), and both results are merged by their log-sum-exp: no dense
    ``rows x keys`` mask exists.
    """

    def __init__(
        self, shape: HeadShape, rows: slice, kv: KvViews, shared: int, mask: torch.Tensor | None
    ) -> None:
        """``mask`` is ``[rows * group, keys - shared]`` for folded rows; None: a triangle."""
        self.row_start, self.row_stop, self.kv = rows.start, rows.stop, kv
        self._shape, self._shared, self._mask = shape, shared, mask

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`RowGroup`."""
        k, v = self.kv.keys[layer], self.kv.values[layer]
        shared = self._shared
        rest, rest_lse = self._rest(queries, k[:, :, shared:], v[:, :, shared:])
        result = out.view(rest.shape)
        if shared == 0:
            result.copy_(rest)
            return
        seen, seen_lse = self._folded(queries, k[:, :, :shared], v[:, :, :shared], None)
        # softmax over both parts: their outputs, weighted by their shares of the exponential sum
        share = torch.sigmoid(rest_lse - seen_lse).unsqueeze(-1).to(out.dtype)
        torch.lerp(seen, rest, share, out=result)

    def _rest(
        self, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._mask is not None:
            return self._folded(queries, k, v, self._mask)
        # A causal triangle needs one row per position: heads stay apart.
        apart = queries.transpose(0, 1)[None]
        attended, lse = flash(apart, k, v, is_causal=True, scale=self._shape.scale)
        split = (len(queries), self._shape.kv_heads, self._shape.group)
        return attended[0].transpose(0, 1).view(*split, -1), lse[0].t().reshape(split)

    def _folded(
        self, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention ``[rows, kv_heads, group, head_dim]`` and log-sum-exp without the last dim."""
        shape = self._shape
        split = (shape.kv_heads, len(queries), shape.group)
        q = queries.view(len(queries), shape.kv_heads, shape.group, -1).transpose(0, 1)
        q = q.reshape(1, shape.kv_heads, -1, shape.head_dim)
        attended, lse = flash(q, k, v, attn_mask=mask, scale=shape.scale)
        return attended.view(*split, -1).transpose(0, 1), lse.view(split).transpose(0, 1)


class Sdpa:
    """``F.scaled_dot_product_attention``, for any device: no mask, a triangle, or a dense mask."""

    def __init__(
        self, shape: HeadShape, rows: slice, kv: KvViews, mask: torch.Tensor | None
    ) -> None:
        """``mask`` is additive ``[rows, keys]``; None: the rows are the last keys' own."""
        self.row_start, self.row_stop, self.kv = rows.start, rows.stop, kv
        self._shape, self._mask = shape, mask

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`RowGroup`."""
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            self.kv.keys[layer],
            self.kv.values[layer],
            attn_mask=self._mask,
            is_causal=self._mask is None and self.row_stop - self.row_start > 1,
            scale=self._shape.scale,
            enable_gqa=self._shape.group > 1,
        )
        out.copy_(attended[0].transpose(0, 1))


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp."""
    attended, lse = _FLASH(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return attended, lse
