"""A decoder for Llama-type models that does one thing per operation it cannot avoid.

The generic path (:mod:`rakv_cluster.model.runner`) runs any transformers model unchanged; half of
a small step's time there goes to Python, views and copies. This one runs the same layers on merged
weights (Q, K and V in one product, gate and up in another), rotates with a table, writes K/V
straight into the sequences' slots, and lets :mod:`rakv_cluster.model.linear` choose the product's
kernel by row count. What does not depend on the layer is prepared once per step.
:mod:`rakv_cluster.model.selection` decides at load whether it may be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.model.drift import Follower
from rakv_cluster.model.linear import PLAIN_ROWS, Kernel, RowPlan
from rakv_cluster.model.llama import LlamaWeights, RotaryTable
from rakv_cluster.model.row_attention import HeadShape, RowGroup
from rakv_cluster.model.row_groups import fast_groups, sdpa_groups, uniform_groups
from rakv_cluster.model.step import Span, Step, check_spans, followers

BLOCK_ROWS = 512
"""Rows that go through a layer together: their temporaries stay in the cache, and bounded."""

NO_BLOCKS = 1 << 30
"""On an accelerator all rows run together."""


class WatchedRows:
    """Those rows of a block that belong to a span which is watched."""

    def __init__(
        self, shape: HeadShape, span: Span, positions: torch.Tensor, start: int, stop: int
    ) -> None:
        """``positions`` are those of the whole step; the block has its rows ``[start, stop)``."""
        rows = slice(max(span.row_start, start), min(span.row_stop, stop))
        self.layers = span.watch.layers
        self._shape, self._span = shape, span
        self._positions = positions[rows].to(span.buffer.data.device)
        self._rows = slice(rows.start - start, rows.stop - start)

    def attend(self, layer: int, rotated: torch.Tensor) -> None:
        """Tell the watch, of the block's rotated heads ``[padded, all heads, head_dim]``."""
        queries = rotated[self._rows, : self._shape.heads].transpose(0, 1)
        self._span.tell_watch(layer, queries, self._positions, scaling=self._shape.scale)


class Scratch:
    """What a block's rows hand from one operation of a layer to the next; all layers use it again.

    ``rotated`` ``[rows, all heads, head_dim]`` are the queries, keys and values; ``attended``
    ``[rows, heads, head_dim]`` is what attention makes of them.
    """

    def __init__(self, shape: HeadShape, rows: int, like: torch.Tensor) -> None:
        """On the device of ``like`` and in its dtype."""
        all_heads, half = shape.heads + 2 * shape.kv_heads, shape.head_dim // 2
        self.rotated = like.new_empty(rows, all_heads, shape.head_dim)
        self.attended = like.new_zeros(rows, shape.heads, shape.head_dim)
        self._half, self._rotating = half, shape.heads + shape.kv_heads
        self._low, self._high = self.rotated[..., :half], self.rotated[..., half:]
        # V takes part in the rotation by angle 0, so that one pass fills all heads.
        self._cos = torch.ones_like(self.rotated)
        self._sin_low, self._sin_high = torch.zeros_like(self._low), torch.zeros_like(self._high)

    def turn_to(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Take the angles of a step: ``[rows, 1, head_dim]``."""
        self._cos[:, : self._rotating] = cos
        self._sin_low[:, : self._rotating] = -sin[..., : self._half]
        self._sin_high[:, : self._rotating] = sin[..., self._half :]

    def rotate(self, qkv: torch.Tensor) -> None:
        """Fill ``rotated`` from the product ``[rows, all heads * head_dim]``."""
        source = qkv.view(self.rotated.shape)
        torch.mul(source, self._cos, out=self.rotated)
        self._low.addcmul_(source[..., self._half :], self._sin_low)
        self._high.addcmul_(source[..., : self._half], self._sin_high)


class Block:
    """Rows of a step, from ``start`` on, that run through each layer together.

    Rows in no group are padding: they repeat the last one, write no K/V and attend to nothing.
    Holds the views of its scratch that every layer would otherwise make again.
    """

    def __init__(
        self,
        shape: HeadShape,
        scratch: Scratch,
        *,
        start: int,
        kernel: Kernel,
        groups: list[RowGroup],
        watched: list[WatchedRows],
        followers: Sequence[Follower],
    ) -> None:
        self.rows = slice(start, start + len(scratch.rotated))
        self.scratch, self.kernel = scratch, kernel
        self._watched, self._followers = watched, followers
        self._parts = []
        for group in groups:
            rows = slice(group.row_start - start, group.row_stop - start)
            kv = scratch.rotated[rows, shape.heads :].view(-1, 2, shape.kv_heads, shape.head_dim)
            queries, new_kv = scratch.rotated[rows, : shape.heads], kv.permute(1, 2, 0, 3)
            self._parts.append((group, queries, new_kv, scratch.attended[rows]))

    def attend(self, layer: int) -> None:
        """Store K/V of the rotated rows and attend."""
        for group, _, kv, _ in self._parts:
            group.kv.store(layer, kv)
        for follower in self._followers:
            follower.follow(layer)
        for group, queries, _, out in self._parts:
            group.attend(layer, queries, out)
        for rows in self._watched:
            rows.attend(layer, self.scratch.rotated)


class FusedLlamaRunner:
    """Runs steps on :class:`LlamaWeights`; see :class:`rakv_cluster.model.step.Runner`."""

    def __init__(
        self, weights: LlamaWeights, *, rows: RowPlan = PLAIN_ROWS, uniform: bool = False
    ) -> None:
        """``uniform`` (CPU only): attention whose bits do not depend on how rows are packed."""
        self._weights = weights
        self._rows = rows
        self._layout = weights.layout
        self._rotary = RotaryTable(weights)
        on_cpu = weights.embedding.device.type == "cpu"
        grouping = (uniform_groups if uniform else fast_groups) if on_cpu else sdpa_groups
        self._groups = grouping(weights.shape)
        self._block_rows = BLOCK_ROWS if on_cpu else NO_BLOCKS

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV it reads and writes."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._weights.head.outputs

    @property
    def context_tokens(self) -> int:
        """Most positions a sequence may have."""
        return self._weights.context_tokens

    @property
    def device(self) -> torch.device:
        """Where the weights and buffers live."""
        return self._weights.embedding.device

    @property
    def weights(self) -> LlamaWeights:
        """What it runs on; packed copies of them count against the memory budget."""
        return self._weights

    @property
    def rows(self) -> RowPlan:
        """Which kernel runs how many rows."""
        return self._rows

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """See :meth:`rakv_cluster.model.step.Runner.forward`.

        Raises ``ValueError`` for a step whose spans do not cover its rows or fit their buffers.
        """
        check_spans(step)
        blocks = self._blocks(step)
        padding = blocks[-1].rows.stop - step.token_ids.shape[0]
        token_ids = _padded(step.token_ids, padding).to(self.device)
        hidden = self._embed(token_ids)
        parts = [(block, hidden[block.rows]) for block in blocks]
        for index in range(len(self._weights.layers)):
            for block, rows in parts:
                self._run_layer(index, block, rows)
        return self._logits(hidden, step.logit_rows)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, self._weights.embedding)

    def _block_scratch(self, rows: int) -> Scratch:
        return Scratch(self._weights.shape, rows, self._weights.embedding)

    def _blocks(self, step: Step) -> list[Block]:
        """Blocks of equal size; only the last one may be padded."""
        total = step.token_ids.shape[0]
        count = -(-total // self._block_rows)
        size = -(-total // count)
        groups = list(self._groups(step.spans, step.positions, size))
        needed = max(span.last_position for span in step.spans) + 1
        blocks = []
        for start in range(0, total, size):
            stop = min(start + size, total)
            choice = self._rows.choose(stop - start)
            padded = max(stop - start, choice.min_rows)
            positions = _padded(step.positions[start:stop], padded - stop + start)
            scratch = self._block_scratch(padded)
            scratch.turn_to(*self._rotary.rows(positions.to(self.device), needed))
            mine = [group for group in groups if start <= group.row_start < stop]
            watched = [
                WatchedRows(self._weights.shape, span, step.positions, start, stop)
                for span in step.spans
                if span.watch.layers and span.row_start < stop and start < span.row_stop
            ]
            blocks.append(
                Block(
                    self._weights.shape,
                    scratch,
                    start=start,
                    kernel=choice.kernel,
                    groups=mine,
                    watched=watched,
                    followers=followers(step, slice(start, stop)),
                )
            )
        return blocks

    def _run_layer(self, index: int, block: Block, hidden: torch.Tensor) -> None:
        """Add the layer's attention and MLP to ``hidden`` ``[rows, hidden]`` in place."""
        self._before_attention(index, hidden, block.scratch, block.kernel)
        block.attend(index)
        self._behind_attention(index, hidden, block.scratch, block.kernel)

    def _before_attention(
        self, index: int, hidden: torch.Tensor, scratch: Scratch, kernel: Kernel
    ) -> None:
        layer = self._weights.layers[index]
        normed = rms_norm(hidden, layer.input_norm, self._weights.norm_eps)
        scratch.rotate(layer.qkv.apply(normed, kernel))

    def _behind_attention(
        self, index: int, hidden: torch.Tensor, scratch: Scratch, kernel: Kernel
    ) -> None:
        layer = self._weights.layers[index]
        hidden += layer.output.apply(scratch.attended.flatten(1), kernel)
        normed = rms_norm(hidden, layer.mlp_norm, self._weights.norm_eps)
        gate, up = layer.gate_up.apply(normed, kernel).chunk(2, dim=1)
        # weight_first hands out a transposed view and wants its own input contiguous
        activated = torch.mul(functional.silu(gate), up, out=gate.new_empty(gate.shape))
        hidden += layer.down.apply(activated, kernel)

    def _logits(self, hidden: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        count = logit_rows.shape[0]
        if count == 0:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        choice = self._rows.choose(count)
        rows = _padded(logit_rows, max(0, choice.min_rows - count)).to(self.device)
        return self._rows_logits(hidden[rows], choice.kernel)[:count]

    def _rows_logits(self, hidden: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """float32 ``[rows, vocab_size]`` of all rows of ``hidden``, the caller's."""
        weights = self._weights
        normed = rms_norm(hidden, weights.final_norm, weights.norm_eps)
        return weights.head.apply(normed, kernel).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` ``[rows, n]`` over the root mean square of each row, times ``weight``.

    On the CPU ``F.rms_norm`` runs as seven operations, one of them a slow power: 512 rows of 576
    take it 765 us, this way 46.
    """
    if x.dtype != torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = norm.square_().mul_(1 / x.shape[1])
    return (x * mean_square.add_(eps).rsqrt_()).mul_(weight)


def _padded(values: torch.Tensor, count: int) -> torch.Tensor:
    """``values`` with its last one repeated ``count`` times more."""
    return values if count == 0 else torch.cat([values, values[-1:].expand(count)])
