"""The engine's one primitive: run these tokens, at these positions, against these buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.model.drift import NO_DRIFT, Drift, Follower, MakeFollower, ProductFollower
from rakv_cluster.model.watch import UNWATCHED, AttentionWatch


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[row_start, row_stop)`` of a step: one sequence's tokens in ascending positions.

    Their K/V go into ``buffer`` at their positions; each row attends to every slot up to its own
    position (in sliding-window layers, to the window before it). Slots between 0 and the span's
    last position must hold that sequence's KV or be written by this span. ``watch`` is told what
    they attend to. Slots that ``drift`` says are reused follow what the rows repair.
    """

    buffer: KvBuffer
    row_start: int
    row_stop: int
    first_position: int
    last_position: int
    watch: AttentionWatch = UNWATCHED
    drift: Drift = NO_DRIFT

    def tell_watch(
        self,
        layer: int,
        queries: torch.Tensor,
        positions: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None = None,
    ) -> None:
        """Once the rows' K/V of ``layer`` are in the buffer: what its ``queries`` attend to, if
        that layer is watched; arguments as of :meth:`AttentionWatch.observe`."""
        if layer in self.watch.layers:
            keys = self.buffer.keys(layer)
            self.watch.observe(queries, keys, positions, scaling=scaling, window=window)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over packed rows.

    ``token_ids`` and ``positions`` are int64 ``[T]`` on the CPU (the runner moves them);
    ``spans`` cover all rows in order; ``logit_rows`` int64 ``[R]`` says for which rows logits are
    wanted. Positions inside a span ascend strictly; they are usually contiguous, but repair runs
    scattered ones.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    spans: tuple[Span, ...]
    logit_rows: torch.Tensor


def check_spans(step: Step) -> None:
    """Raise ``ValueError`` unless the spans cover the rows in order and fit their buffers.

    A wrong step would otherwise overwrite another sequence's KV.
    """
    row = 0
    for span in step.spans:
        if span.row_start != row or span.row_stop <= row:
            raise ValueError(f"span starts at row {span.row_start}, expected {row}")
        if not 0 <= span.first_position <= span.last_position < span.buffer.capacity:
            raise ValueError(
                f"positions {span.first_position}..{span.last_position} do not fit a buffer of "
                f"{span.buffer.capacity} slots"
            )
        row = span.row_stop
    if row != len(step.token_ids):
        raise ValueError(f"spans cover {row} of {len(step.token_ids)} rows")


def followers(
    step: Step, rows: slice, make: MakeFollower = ProductFollower
) -> tuple[Follower, ...]:
    """One for each span with reused slots that follow some of ``rows`` of the step.

    To be made before any of those rows' K/V are stored.
    """
    found = []
    for span in step.spans:
        start, stop = max(span.row_start, rows.start), min(span.row_stop, rows.stop)
        if start < stop and len(span.drift.computed):
            first, last = step.positions[[start, stop - 1]].tolist()
            between = span.drift.between(first, last)
            if len(between.repaired) and len(between.kept):
                found.append(make(span.drift, between, span.buffer))
    return tuple(found)


class Runner(Protocol):
    """A loaded model. Not thread-safe: one engine thread owns it."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV it reads and writes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def context_tokens(self) -> int:
        """Most positions a sequence may have."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights and buffers live."""
        ...

    def forward(self, step: Step) -> torch.Tensor:
        """Logits, float32 ``[R, vocab_size]`` on ``device``. Writes K/V; leaves lengths alone."""
        ...
