"""The fused decoder over native kernels: steps of few rows, one call and one attention per layer.

The kernels do everything but attention (:mod:`rakv_cluster.model.native`). In steps of more rows
the products are oneDNN's and the kernels do what stands between them, by the same instructions: a
position has the same bits in either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from rakv_cluster.model.fused import BLOCK_ROWS, FusedLlamaRunner
from rakv_cluster.model.linear import UNIFORM_ROWS, Kernel
from rakv_cluster.model.llama import Layer, LlamaWeights
from rakv_cluster.model.native import NativeStep, NativeWeights, native_library
from rakv_cluster.model.row_attention import HeadShape, Masked
from rakv_cluster.model.row_groups import uniform_groups
from rakv_cluster.model.step import Span, Step, check_spans

SMALL_ROWS = 64
"""Up to so many rows the native products are the quicker ones; from 128 on oneDNN's are as quick
(docs/experiments.md)."""

_FLOAT_BYTES = 4


class _WatchedGroup:
    """A group whose span is watched; its rotated queries lie folded in the group's scratch."""

    def __init__(
        self, shape: HeadShape, span: Span, group: Masked, positions: torch.Tensor
    ) -> None:
        """``positions`` are the group's rows'."""
        self._span, self._positions, self._scale = span, positions, shape.scale
        rows = len(positions)
        folded = group.queries[0, :, : rows * shape.group]
        split = (shape.kv_heads, rows, shape.group, shape.head_dim)
        self._queries = folded.view(split).transpose(1, 2)

    def attend(self, layer: int) -> None:
        """Tell the watch."""
        self._span.tell_watch(layer, self._queries, self._positions, scaling=self._scale)


class _Block:
    """Rows of a step that run through each layer together, as the kernels see them."""

    def __init__(
        self,
        rows: slice,
        groups: Sequence[Masked],
        watched: Sequence[_WatchedGroup],
        *,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        slots: np.ndarray,
        head_group: int,
    ) -> None:
        """``hidden`` and ``rotary`` are the block's rows; ``slots`` as :func:`_slots` has them."""
        count = rows.stop - rows.start
        self.rows, self.groups, self.hidden = rows, groups, hidden
        self._watched = watched
        table = np.empty((8, count), np.int64)
        table[:4] = slots
        row_bytes = head_group * _FLOAT_BYTES
        for number, group in enumerate(groups):
            mine = slice(group.row_start - rows.start, group.row_stop - rows.start)
            index = np.arange(mine.stop - mine.start)
            queries = group.queries
            table[4, mine] = queries.data_ptr() + index * (row_bytes * queries.shape[3])
            table[5, mine] = queries.stride(1)
            table[6, mine] = number
            table[7, mine] = index
        self._attended = np.empty(len(groups), np.int64)
        cosines, sines = rotary
        self.step = NativeStep(
            count,
            hidden.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            *(table.ctypes.data + row * count * table.itemsize for row in range(8)),
            self._attended.ctypes.data,
            None,
            torch.get_num_threads(),
        )
        self.step.kept = (table, cosines, sines)

    def attend(self, layer: int) -> list[torch.Tensor]:
        """Attention of all groups: valid for the kernels as long as what is returned lives."""
        attended = [group.attended(layer).contiguous() for group in self.groups]
        self._attended[:] = [each.data_ptr() for each in attended]
        for group in self._watched:
            group.attend(layer)
        return attended


class NativeLlamaRunner(FusedLlamaRunner):
    """Runs steps on packed weights; uniform numerics (:mod:`rakv_cluster.model.row_groups`)."""

    def __init__(self, weights: LlamaWeights) -> None:
        """Raises :class:`~rakv_cluster.errors.UnsupportedModel` where the kernels cannot."""
        super().__init__(weights, rows=UNIFORM_ROWS, uniform=True)
        self._native = native_library()
        self._native_weights = NativeWeights(self._native, weights)
        self._shape = self._native_weights.shape.address
        self._layers = [layer.address for layer in self._native_weights.layers]
        self._masked = uniform_groups(weights.shape)

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """See :meth:`rakv_cluster.model.step.Runner.forward`.

        Raises ``ValueError`` for a step whose spans do not cover its rows or fit their buffers.
        """
        check_spans(step)
        hidden = functional.embedding(step.token_ids, self._weights.embedding)
        blocks = self._native_blocks(step, hidden)
        if hidden.shape[0] <= SMALL_ROWS:
            self._run_small(blocks[0])
        else:
            self._run_large(blocks)
        return self._head(hidden, step.logit_rows)

    def _native_blocks(self, step: Step, hidden: torch.Tensor) -> list[_Block]:
        total = step.token_ids.shape[0]
        size = -(-total // -(-total // BLOCK_ROWS))
        groups = list(self._masked(step.spans, step.positions, size))
        needed = max(span.last_position for span in step.spans) + 1
        cosines, sines = self._rotary.rows(step.positions, needed)
        slots = _slots(step.spans, step.positions.numpy())
        blocks = []
        for start in range(0, total, size):
            rows = slice(start, min(start + size, total))
            mine = [group for group in groups if rows.start <= group.row_start < rows.stop]
            blocks.append(
                _Block(
                    rows,
                    mine,
                    self._watched(step, mine),
                    hidden=hidden[rows],
                    rotary=(cosines[rows], sines[rows]),
                    slots=slots[:, rows],
                    head_group=self._weights.shape.group,
                )
            )
        return blocks

    def _watched(self, step: Step, groups: Sequence[Masked]) -> list[_WatchedGroup]:
        return [
            _WatchedGroup(
                self._weights.shape, span, group, step.positions[group.row_start : group.row_stop]
            )
            for span in step.spans
            if span.watch.layers
            for group in groups
            if span.row_start <= group.row_start < span.row_stop
        ]

    def _run_small(self, block: _Block) -> None:
        """All layers over ``block.hidden``, in place."""
        step, run = block.step, self._native.rakv_layer
        floats = self._native.rakv_scratch(self._shape, step.rows, step.threads)
        scratch = torch.empty(floats)
        step.scratch = scratch.data_ptr()
        shape, where = self._shape, step.address
        run(shape, where, None, self._layers[0], -1)
        following = [*self._layers[1:], None]
        for number, (layer, then) in enumerate(zip(self._layers, following, strict=True)):
            attended = block.attend(number)
            run(shape, where, layer, then, number)
            del attended

    def _run_large(self, blocks: Sequence[_Block]) -> None:
        """All layers over the blocks' ``hidden``, in place, layer by layer: a block attends to the
        ones before it."""
        normed = [torch.empty_like(block.hidden) for block in blocks]
        first = self._weights.layers[0].input_norm
        for block, x in zip(blocks, normed, strict=True):
            self._add_norm(block.hidden, None, first, x)
        norms = [layer.input_norm for layer in self._weights.layers[1:]]
        following = [*norms, None]
        for number, layer in enumerate(self._weights.layers):
            for block, x in zip(blocks, normed, strict=True):
                self._run_layer_large(number, layer, block, x, following[number])

    def _run_layer_large(
        self, number: int, layer: Layer, block: _Block, x: torch.Tensor, then: torch.Tensor | None
    ) -> None:
        """One layer over normed rows ``x``, which become the next layer's (``then``: its norm)."""
        native, where, rows = self._native, block.step.address, x.shape[0]
        qkv = layer.qkv.apply(x, Kernel.PACKED)
        native.rakv_place(self._shape, where, qkv.data_ptr(), number)
        parts = block.attend(number)
        attended = x.new_empty(rows, layer.output.weight.shape[1])
        native.rakv_gather(self._shape, where, attended.data_ptr())
        del parts
        update = layer.output.apply(attended, Kernel.PACKED)
        self._add_norm(block.hidden, update, layer.mlp_norm, x)
        gate_up = layer.gate_up.apply(x, Kernel.PACKED)
        inner = x.new_empty(rows, layer.down.weight.shape[1])
        threads = block.step.threads
        native.rakv_activate(self._shape, gate_up.data_ptr(), inner.data_ptr(), rows, threads)
        self._add_norm(block.hidden, layer.down.apply(inner, Kernel.PACKED), then, x)

    def _add_norm(
        self,
        hidden: torch.Tensor,
        update: torch.Tensor | None,
        weight: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Add ``update`` to ``hidden``, and its norm into ``out`` unless ``weight`` is None."""
        self._native.rakv_add_norm(
            self._shape,
            hidden.data_ptr(),
            None if update is None else update.data_ptr(),
            None if weight is None else weight.data_ptr(),
            out.data_ptr(),
            hidden.shape[0],
            torch.get_num_threads(),
        )

    def _head(self, hidden: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        count, weights = logit_rows.shape[0], self._weights
        if count == 0:
            return hidden.new_empty(0, self.vocab_size)
        normed = hidden.new_empty(count, hidden.shape[1])
        if count > SMALL_ROWS:
            self._add_norm(hidden[logit_rows], None, weights.final_norm, normed)
            return weights.head.apply(normed, Kernel.PACKED)
        logits = hidden.new_empty(count, self.vocab_size)
        width = hidden.shape[1] * _FLOAT_BYTES
        places = hidden.data_ptr() + logit_rows.numpy() * width
        self._native.rakv_head(
            self._shape,
            places.ctypes.data,
            count,
            weights.final_norm.data_ptr(),
            self._native_weights.head.address,
            normed.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits


def _slots(spans: Sequence[Span], positions: np.ndarray) -> np.ndarray:
    """Per row the address of its K in the first layer, and its buffer's strides from layer to
    layer, from K to V and from head to head: int64 ``[4, rows]``."""
    table = np.empty((4, len(positions)), np.int64)
    for span in spans:
        data, rows = span.buffer.data, slice(span.row_start, span.row_stop)
        layer, value, head, slot, _ = data.stride()
        table[0, rows] = data.data_ptr() + positions[rows] * (slot * _FLOAT_BYTES)
        table[1:, rows] = np.array([[layer], [value], [head]])
    return table
