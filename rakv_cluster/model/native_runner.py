"""The fused decoder over native kernels: steps of few rows are one call.

In steps of more rows the products are oneDNN's and the kernels (:mod:`rakv_cluster.model.native`)
do what stands between them, attention too, by the same instructions: a position has the same bits
in either.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.drift import Between, Drift, Follower, MakeFollower, ProductFollower
from rakv_cluster.model.fused import BLOCK_ROWS, FusedLlamaRunner, WatchedRows
from rakv_cluster.model.linear import UNIFORM_ROWS, Kernel, Linear
from rakv_cluster.model.llama import LlamaWeights
from rakv_cluster.model.native import NativeStep, NativeWeight, NativeWeights, native_library
from rakv_cluster.model.native_drift import MOST_DIM, NativeFollower
from rakv_cluster.model.row_attention import HeadShape
from rakv_cluster.model.step import Step, check_spans, followers

SMALL_ROWS = 64
"""Up to so many rows the native products are the quicker ones, and they take no more (``MAX_ROWS``
of native.c); from 128 on oneDNN's are as quick (docs/experiments.md)."""

TILE_ROWS = 192
"""Most query heads (of one KV head) times rows that attend together: they share the reading of K
and V, and their queries and sums stay in the cache."""

_MANY_ROWS = 4
"""A small step stays one call unless so many times fewer rows' logits are wanted than it has: then
what the last layer would compute for the others is saved."""

_LEAST_TILE = 4
"""No span is cut into tiles of fewer rows: every tile transposes the keys for itself."""


class _Block:
    """Rows of a step that run through each layer together, as the kernels see them."""

    def __init__(
        self,
        shape: HeadShape,
        step: Step,
        rows: slice,
        *,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        follower: MakeFollower,
    ) -> None:
        """``hidden`` and ``rotary`` are the block's rows; ``follower`` makes what follows them."""
        count = rows.stop - rows.start
        self.rows, self.hidden, self._shape = rows, hidden, shape
        self.watched: list[WatchedRows] = []
        tile_rows, starts = max(TILE_ROWS // shape.group, 1), []
        threads = torch.get_num_threads()
        shares = threads // math.gcd(threads, shape.kv_heads)
        table = np.empty((4, count), np.int64)
        for span in step.spans:
            start, stop = max(span.row_start, rows.start), min(span.row_stop, rows.stop)
            if start >= stop:
                continue
            mine = slice(start - rows.start, stop - rows.start)
            data = span.buffer.data
            table[:, mine] = np.array([[data.data_ptr(), *data.stride()[:3]]]).T
            starts.extend(_tiles(mine, tile_rows, shares))
            if span.watch.layers:
                self.watched.append(WatchedRows(shape, span, step.positions, rows.start, rows.stop))
        self.followers = followers(step, rows, follower)
        positions = step.positions[rows].contiguous()
        tiles = np.array([*starts, count], np.int64)
        cosines, sines = rotary
        self.step = NativeStep(
            count,
            hidden.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            positions.data_ptr(),
            *(table.ctypes.data + row * count * table.itemsize for row in range(4)),
            len(starts),
            tile_rows,
            tiles.ctypes.data,
            None,
            threads,
        )
        self.step.kept = (table, tiles, positions, cosines, sines)

    def tell_watches(self, layer: int, qkv: torch.Tensor) -> None:
        """Of attention just done; ``qkv`` starts with the block's rotated heads, row by row."""
        if self.watched:
            heads = self._shape.heads + 2 * self._shape.kv_heads
            rotated = qkv.view(-1)[: len(self.hidden) * heads * self._shape.head_dim]
            rotated = rotated.view(len(self.hidden), heads, self._shape.head_dim)
            for each in self.watched:
                each.attend(layer, rotated)


class NativeLlamaRunner(FusedLlamaRunner):
    """Runs steps on packed weights; uniform numerics (:mod:`rakv_cluster.model.row_groups`)."""

    def __init__(self, weights: LlamaWeights) -> None:
        """Raises :class:`~rakv_cluster.errors.UnsupportedModel` where the kernels cannot."""
        super().__init__(weights, rows=UNIFORM_ROWS, uniform=True)
        self._native = native_library()
        self._native_weights = NativeWeights(self._native, weights)
        self._shape = self._native_weights.shape.address

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """See :meth:`rakv_cluster.model.step.Runner.forward`.

        Raises ``ValueError`` for a step whose spans do not cover its rows or fit their buffers.
        """
        check_spans(step)
        hidden = functional.embedding(step.token_ids, self._weights.embedding)
        blocks = self._native_blocks(step, hidden)
        rows, wanted = hidden.shape[0], len(step.logit_rows)
        if rows > SMALL_ROWS or blocks[0].followers:
            return self._head(self._run_large(blocks, step.logit_rows))
        if _MANY_ROWS * wanted > rows:
            self._run_small(blocks[0], len(self._weights.layers))
            return self._head(hidden[step.logit_rows])
        self._run_small(blocks[0], len(self._weights.layers) - 1)
        normed = self._start_layer(len(self._weights.layers) - 1, blocks)
        return self._head(self._run_last(blocks, normed, step.logit_rows))

    def _native_blocks(self, step: Step, hidden: torch.Tensor) -> list[_Block]:
        total = step.token_ids.shape[0]
        size = -(-total // -(-total // BLOCK_ROWS))
        needed = max(span.last_position for span in step.spans) + 1
        cosines, sines = self._rotary.rows(step.positions, needed)
        blocks = []
        for start in range(0, total, size):
            rows = slice(start, min(start + size, total))
            blocks.append(
                _Block(
                    self._weights.shape,
                    step,
                    rows,
                    hidden=hidden[rows],
                    rotary=(cosines[rows], sines[rows]),
                    follower=self._follower,
                )
            )
        return blocks

    def _follower(self, drift: Drift, between: Between, buffer: KvBuffer) -> Follower:
        if self._weights.shape.head_dim > MOST_DIM:
            return ProductFollower(drift, between, buffer)
        return NativeFollower(self._native, drift, between, buffer)

    def _scratch(self, step: NativeStep, rows: int) -> torch.Tensor:
        """Scratch of a small step's rows (or, of none, what attention needs), told to the step."""
        floats = self._native.rakv_scratch(self._shape, rows, step.tile_rows, step.threads)
        scratch = torch.empty(floats)
        step.scratch = scratch.data_ptr()
        step.kept = (*step.kept, scratch)
        return scratch

    def _run_small(self, block: _Block, count: int) -> None:
        """The first ``count`` layers over ``block.hidden``, in place; in one call unless a watch
        wants to see."""
        step, layers = block.step, self._native_weights.layers
        scratch = self._scratch(step, step.rows)
        rotated = scratch[step.rows * self._weights.shape.heads * self._weights.shape.head_dim :]
        watched = {number for each in block.watched for number in each.layers if number < count}
        first, at = 0, ctypes.addressof(layers)
        for last in sorted(watched | {count - 1}):
            self._native.rakv_layers(self._shape, step.address, at, first, last + 1)
            block.tell_watches(last, rotated)
            first = last + 1

    def _run_large(self, blocks: Sequence[_Block], logit_rows: torch.Tensor) -> torch.Tensor:
        """All layers over the blocks' ``hidden``, in place, layer by layer: a block attends to the
        ones before it."""
        normed = self._start_layer(0, blocks)
        for number in range(len(self._weights.layers) - 1):
            then = self._weights.layers[number + 1].input_norm
            for block, x in zip(blocks, normed, strict=True):
                attended = self._attend(number, block, x)
                self._finish_layer(number, block.hidden, attended, x, then)
        return self._run_last(blocks, normed, logit_rows)

    def _start_layer(self, number: int, blocks: Sequence[_Block]) -> list[torch.Tensor]:
        """The blocks' rows as layer ``number`` wants them: normed."""
        normed = [torch.empty_like(block.hidden) for block in blocks]
        scratch = self._scratch(blocks[0].step, 0)
        for block, x in zip(blocks, normed, strict=True):
            block.step.scratch = scratch.data_ptr()
            self._add_norm(block.hidden, None, self._weights.layers[number].input_norm, x)
        return normed

    def _run_last(
        self, blocks: Sequence[_Block], normed: Sequence[torch.Tensor], logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The last layer. Behind its attention only ``logit_rows`` go on: ``[R, hidden]``."""
        last = len(self._weights.layers) - 1
        result = blocks[0].hidden.new_empty(len(logit_rows), blocks[0].hidden.shape[1])
        for block, x in zip(blocks, normed, strict=True):
            wanted = (logit_rows >= block.rows.start) & (logit_rows < block.rows.stop)
            rows = logit_rows[wanted] - block.rows.start
            if not len(rows):
                block.step.tiles = 0  # K and V are all that is wanted
            attended = self._attend(last, block, x)[rows]
            hidden = block.hidden[rows]
            self._finish_layer(last, hidden, attended, torch.empty_like(hidden), None)
            result[wanted] = hidden
        return result

    def _attend(self, number: int, block: _Block, x: torch.Tensor) -> torch.Tensor:
        """Attention of a layer over the block's normed rows ``x``; stores their K and V."""
        layer = self._weights.layers[number]
        qkv = self._product(layer.qkv, self._native_weights.layers[number].qkv, x)
        attended = x.new_empty(x.shape[0], layer.output.weight.shape[1])
        step = block.step.address
        native = self._native
        native.rakv_place(self._shape, step, qkv.data_ptr(), number)
        for follower in block.followers:
            follower.follow(number)
        native.rakv_attend(self._shape, step, qkv.data_ptr(), number, attended.data_ptr())
        block.tell_watches(number, qkv)
        return attended

    def _finish_layer(
        self,
        number: int,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        x: torch.Tensor,
        then: torch.Tensor | None,
    ) -> None:
        """The layer behind its attention, into ``hidden``; its norm by ``then`` into ``x``."""
        rows, threads = hidden.shape[0], torch.get_num_threads()
        if rows == 0:
            return
        layer, native = self._weights.layers[number], self._native_weights.layers[number]
        update = self._product(layer.output, native.output, attended)
        self._add_norm(hidden, update, layer.mlp_norm, x)
        gate_up = self._product(layer.gate_up, native.gate_up, x)
        inner = x.new_empty(rows, layer.down.weight.shape[1])
        self._native.rakv_activate(self._shape, gate_up.data_ptr(), inner.data_ptr(), rows, threads)
        self._add_norm(hidden, self._product(layer.down, native.down, inner), then, x)

    def _product(self, linear: Linear, native: NativeWeight, x: torch.Tensor) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``, by the kernels for as many rows."""
        rows = x.shape[0]
        if rows > SMALL_ROWS:
            return linear.apply(x, Kernel.PACKED)
        out = x.new_empty(rows, linear.outputs)
        threads = torch.get_num_threads()
        self._native.rakv_product(native.address, x.data_ptr(), rows, out.data_ptr(), threads)
        return out

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

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of all rows."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.vocab_size)
        normed = torch.empty_like(hidden)
        self._add_norm(hidden, None, self._weights.final_norm, normed)
        return self._product(self._weights.head, self._native_weights.head, normed)


def _tiles(rows: slice, most: int, shares: int) -> list[int]:
    """First rows of about equal parts of ``rows``, of at most ``most`` rows; a multiple of
    ``shares`` of them, where that leaves enough in each, so that threads have equally much."""
    count = rows.stop - rows.start
    wanted = -(-count // most)
    pieces = max(wanted, min(-(-wanted // shares) * shares, count // _LEAST_TILE), 1)
    return [rows.start + count * piece // pieces for piece in range(pieces)]
