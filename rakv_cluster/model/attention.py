"""Attention of packed rows over each sequence's own buffer, and how transformers is told to use it.

:func:`plan_step` says once per step which rows form a group; :func:`attend` computes one layer of
one span. Importing this module registers :data:`BACKEND` with transformers: every model whose
layers go through its attention interface then runs packed, unchanged. No mask function is
registered beside it, for which transformers builds no mask at all: causality and sliding windows
are decided here, by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.drift import Follower
from rakv_cluster.model.step import Span, Step, check_spans, followers

BACKEND = "rakv"
"""Name of the attention implementation in transformers."""

PLAN_KWARG = "rakv_plan"
"""Forward keyword that carries the :class:`StepPlan` through a transformers model."""

GROUP_ROWS = 128
"""Most rows of one masked attention call: bounds a mask to ``GROUP_ROWS x context``."""

UNSUPPORTED_KWARGS = ("softcap", "s_aux", "position_bias")
"""What some architectures hand to their attention function and :func:`attend` does not do."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows ``[start, stop)`` of a span, at positions from ``first`` to ``last``."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """One span of a step, ready for every layer.

    ``positions`` is int64 ``[rows]`` on the device; ``groups`` cut the rows into runs of at most
    ``GROUP_ROWS``, so that each run's keys end at its own last position.
    """

    span: Span
    positions: torch.Tensor
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """Rows of the span."""
        return self.span.row_stop - self.span.row_start

    @property
    def contiguous(self) -> bool:
        """Whether the positions have no gaps."""
        return self.span.last_position - self.span.first_position + 1 == self.rows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All spans of one step, in row order, its positions on the device (int64 ``[T]``), and what
    follows the rows' new K/V."""

    spans: tuple[SpanPlan, ...]
    positions: torch.Tensor
    followers: tuple[Follower, ...]


def plan_step(step: Step, device: torch.device) -> StepPlan:
    """Cut every span of ``step`` into groups; moves its positions to ``device``, once.

    Raises ``ValueError`` like :func:`rakv_cluster.model.step.check_spans`.
    """
    check_spans(step)
    positions = step.positions.to(device, non_blocking=True)
    spans = tuple(
        SpanPlan(span, positions[span.row_start : span.row_stop], _groups(span, step.positions))
        for span in step.spans
    )
    return StepPlan(spans, positions, followers(step, slice(0, len(positions))))


def _groups(span: Span, positions: torch.Tensor) -> tuple[RowGroup, ...]:
    rows = span.row_stop - span.row_start
    groups = []
    for start in range(0, rows, GROUP_ROWS):
        stop = min(start + GROUP_ROWS, rows)
        first, last = positions[[span.row_start + start, span.row_start + stop - 1]].tolist()
        groups.append(RowGroup(start, stop, first, last))
    return tuple(groups)


def attend(
    query: torch.Tensor,
    buffer: KvBuffer,
    layer: int,
    plan: SpanPlan,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """One layer's attention of one span: ``[heads, rows, head_dim]`` in and out.

    Each row attends to the slots of ``buffer`` up to its own position, in a sliding-window layer
    to the last ``window`` of them. ``scaling`` defaults to ``head_dim ** -0.5``. Query heads
    share KV heads in consecutive groups (GQA), without repeating K and V in memory.
    """
    keys, values = buffer.keys(layer), buffer.values(layer)
    from_zero = plan.contiguous and plan.span.first_position == 0
    if from_zero and (window is None or plan.rows <= window):
        rows = plan.rows
        return _attention(query, keys[:, :rows], values[:, :rows], scaling, causal=rows > 1)
    parts = []
    for group in plan.groups:
        low = 0 if window is None else max(0, group.first - window + 1)
        mask = _mask(plan.positions[group.start : group.stop], low, group.last + 1, window)
        parts.append(
            _attention(
                query[:, group.start : group.stop],
                keys[:, low : group.last + 1],
                values[:, low : group.last + 1],
                scaling,
                mask=mask,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _mask(positions: torch.Tensor, low: int, high: int, window: int | None) -> torch.Tensor | None:
    """Which of the slots ``[low, high)`` each row may see: bool ``[rows, slots]``; None: all."""
    if positions.shape[0] == 1:
        return None
    slots = torch.arange(low, high, device=positions.device)
    rows = positions[:, None]
    if window is None:
        return slots <= rows
    return (slots <= rows) & (slots > rows - window)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    out = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[0] != keys.shape[0],
    )
    return out[0]


class StepCache:
    """What a transformers model takes for its cache during one step.

    :meth:`update` writes the step's K and V into the sequences' buffers; attention reads them
    there. Nothing is kept: the buffers are the cache.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter ``[1, kv_heads, T, head_dim]`` keys and values; returns them as they came."""
        for plan in self._plan.spans:
            span = plan.span
            rows = slice(span.row_start, span.row_stop)
            _write(span.buffer.keys(layer), keys[0, :, rows], plan)
            _write(span.buffer.values(layer), values[0, :, rows], plan)
        for follower in self._plan.followers:
            follower.follow(layer)
        return keys, values

    def get_seq_length(self, _layer: int = 0) -> int:
        """Zero: positions are always given, no model needs to count past tokens."""
        return 0


def _write(slots: torch.Tensor, rows: torch.Tensor, plan: SpanPlan) -> None:
    if plan.contiguous:
        slots[:, plan.span.first_position : plan.span.last_position + 1] = rows
    else:
        slots.index_copy_(1, plan.positions, rows)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: ``[1, heads, T, head_dim]`` to ``[1, T, heads, head_dim]``.

    Raises :class:`UnsupportedModel` where the architecture does not pass the plan through or
    wants something that :func:`attend` does not do.
    """
    plan = kwargs.get(PLAN_KWARG)
    if not isinstance(plan, StepPlan):
        raise UnsupportedModel("the model does not pass forward keywords on to its attention")
    refuse_unsupported(kwargs)
    heads = query[0]
    out = heads.new_empty((heads.shape[1], heads.shape[0], heads.shape[2]))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # nn.Module types attributes as Tensor
    for item in plan.spans:
        rows = slice(item.span.row_start, item.span.row_stop)
        part = attend(
            heads[:, rows], item.span.buffer, layer, item, scaling=scaling, window=sliding_window
        )
        out[rows] = part.transpose(0, 1)
        item.span.tell_watch(
            layer, heads[:, rows], item.positions, scaling=scaling, window=sliding_window
        )
    return out[None], None


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Raise :class:`UnsupportedModel` if attention was called with something it cannot honour."""
    for name in UNSUPPORTED_KWARGS:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"attention with {name!r} is not supported")


AttentionInterface.register(BACKEND, packed_attention)
