"""A decoder for Llama-type models that does one thing per operation it cannot avoid.

The generic path (:mod:`rakv_cluster.model.runner`) runs any transformers model unchanged; half of
a small step's time there goes to Python, views and copies. This one runs the same layers on merged
weights (Q, K and V in one product, gate and up in another), rotates with a table, writes K/V
straight into the sequences' slots, and lets :mod:`rakv_cluster.model.linear` choose the product's
kernel by row count. :mod:`rakv_cluster.model.selfcheck` decides at load whether it may be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.layout import KvLayout, kv_dtype
from rakv_cluster.model.linear import PLAIN_ROWS, Kernel, Linear, RowPlan
from rakv_cluster.model.row_attention import (
    Attention,
    CpuAttention,
    RowGroup,
    SdpaAttention,
)
from rakv_cluster.model.step import Step, check_spans
from rakv_cluster.model.uniform_attention import UniformCpuAttention

BLOCK_ROWS = 512
"""Rows that go through a layer together: their temporaries stay in the cache, and bounded."""

_NO_BLOCKS = 1 << 30
"""On an accelerator all rows run together."""

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; ``qkv`` and ``gate_up`` are stacked along their outputs."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's products in the order in which they run."""
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A Llama-type model's weights and the numbers of its layers.

    ``rotary`` gives cos and sin ``[1, n, head_dim]`` for positions int64 ``[1, n]``: the model's
    own module, so that every RoPE scaling it knows is computed as it computes it.
    """

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Linear
    rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    context_tokens: int

    @property
    def linears(self) -> list[Linear]:
        """Every product of a forward, in the order in which they run."""
        return [linear for layer in self.layers for linear in layer.linears] + [self.head]

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV these weights make."""
        return KvLayout(
            len(self.layers), self.kv_heads, self.head_dim, kv_dtype(self.embedding.dtype)
        )


def llama_weights(model: Any) -> LlamaWeights:
    """Merge the weights of a transformers Llama-type model.

    The merged tensors replace the model's own, which become views of them: the model keeps working
    and nothing is held twice. Raises :class:`UnsupportedModel` for any other architecture.
    """
    _require_llama(model)
    config, base = model.config, model.model
    attention = base.layers[0].self_attn
    return LlamaWeights(
        embedding=base.embed_tokens.weight.data,
        layers=tuple(_layer(layer) for layer in base.layers),
        final_norm=base.norm.weight.data,
        head=_linear(model.lm_head),
        rotary=base.rotary_emb,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        norm_eps=base.norm.variance_epsilon,
        scale=attention.scaling,
        context_tokens=config.max_position_embeddings,
    )


def _require_llama(model: Any) -> None:
    name, config = type(model).__name__, model.config
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(f"the fused decoder runs {', '.join(_ARCHITECTURES)}, not {name}")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"the fused decoder needs a silu MLP, not {config.hidden_act}")
    types = getattr(config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in types) or (
        name == "MistralForCausalLM" and config.sliding_window is not None
    ):
        raise UnsupportedModel("the fused decoder has no sliding-window layers")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(f"rope type {rope_type} depends on the sequence's length")


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_merged(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_linear(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_merged(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight.data, None if module.bias is None else module.bias.data)


def _merged(*modules: Any) -> Linear:
    """Stack the modules' outputs; their own tensors become views of the stacked ones."""
    weight = torch.cat([module.weight.data for module in modules])
    bias = None
    if modules[0].bias is not None:
        bias = torch.cat([module.bias.data for module in modules])
    start = 0
    for module in modules:
        stop = start + module.weight.shape[0]
        module.weight.data = weight[start:stop]
        if bias is not None:
            module.bias.data = bias[start:stop]
        start = stop
    return Linear(weight, bias)


class RotaryTable:
    """cos and sin by position, computed by the model's own module, grown in large pieces."""

    def __init__(self, weights: LlamaWeights, piece_tokens: int = 8192) -> None:
        self._rotary = weights.rotary
        self._like = weights.embedding
        self._piece_tokens = piece_tokens
        self._cos = self._sin = weights.embedding.new_empty(0, weights.head_dim)

    def rows(self, positions: torch.Tensor, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[T, 1, head_dim]``; all positions are below ``needed``."""
        if needed > self._cos.shape[0]:
            stop = -(-needed // self._piece_tokens) * self._piece_tokens
            every = torch.arange(stop, device=self._like.device)[None]
            cos, sin = self._rotary(self._like, every)
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows ``[start, stop)`` that run through each layer together, as ``padded - start`` rows.

    Rows from ``stop`` on repeat the last one; they write no K/V and attend to nothing.
    """

    start: int
    stop: int
    padded: int
    kernel: Kernel
    cos: torch.Tensor
    sin: torch.Tensor
    groups: tuple[RowGroup, ...]


def _padded(values: torch.Tensor, count: int) -> torch.Tensor:
    """``values`` with its last one repeated ``count`` times more."""
    return values if count == 0 else torch.cat([values, values[-1:].expand(count)])


def _attention(*, on_cpu: bool, uniform: bool) -> Callable[[int, int, float], Attention]:
    if not on_cpu:
        return SdpaAttention
    return UniformCpuAttention if uniform else CpuAttention


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
        backend = _attention(on_cpu=on_cpu, uniform=uniform)
        self._attention = backend(weights.heads, weights.kv_heads, weights.scale)
        self._block_rows = BLOCK_ROWS if on_cpu else _NO_BLOCKS

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV it reads and writes."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._weights.head.weight.shape[0]

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
        padding = blocks[-1].padded - len(step.token_ids)
        hidden = functional.embedding(
            _padded(step.token_ids, padding).to(self.device), self._weights.embedding
        )
        for index, layer in enumerate(self._weights.layers):
            for block in blocks:
                self._run_layer(index, layer, block, hidden[block.start : block.padded])
        return self._logits(hidden, step.logit_rows)

    def _blocks(self, step: Step) -> list[_Block]:
        """Blocks of equal size; only the last one may be padded."""
        total = len(step.token_ids)
        count = -(-total // self._block_rows)
        size = -(-total // count)
        groups = self._attention.groups(step.spans, step.positions, size)
        needed = max(span.last_position for span in step.spans) + 1
        blocks = []
        for start in range(0, total, size):
            stop = min(start + size, total)
            choice = self._rows.choose(stop - start)
            padded = max(stop, start + choice.min_rows)
            positions = _padded(step.positions[start:stop], padded - stop).to(self.device)
            cos, sin = self._rotary.rows(positions, needed)
            mine = tuple(g for g in groups if start <= g.row_start < stop)
            blocks.append(_Block(start, stop, padded, choice.kernel, cos, sin, mine))
        return blocks

    def _run_layer(self, index: int, layer: Layer, block: _Block, hidden: torch.Tensor) -> None:
        """Add the layer's attention and MLP to ``hidden`` ``[rows, hidden]`` in place."""
        weights, kernel = self._weights, block.kernel
        normed = functional.rms_norm(hidden, hidden.shape[1:], layer.input_norm, weights.norm_eps)
        rotated = self._rotate(layer.qkv.apply(normed, kernel), block)
        attended = rotated.new_empty(len(hidden), weights.heads, weights.head_dim)
        attended[block.stop - block.start :].zero_()
        for group in block.groups:
            start, stop = group.row_start - block.start, group.row_stop - block.start
            self._write(rotated[start:stop, weights.heads :], group, index)
            queries = rotated[start:stop, : weights.heads]
            self._attention.attend(queries, group, index, attended[start:stop])
        hidden += layer.output.apply(attended.flatten(1), kernel)
        normed = functional.rms_norm(hidden, hidden.shape[1:], layer.mlp_norm, weights.norm_eps)
        gate, up = layer.gate_up.apply(normed, kernel).chunk(2, dim=1)
        # weight_first hands out a transposed view and wants its own input contiguous
        activated = torch.mul(functional.silu(gate), up, out=gate.new_empty(gate.shape))
        hidden += layer.down.apply(activated, kernel)

    def _rotate(self, qkv: torch.Tensor, block: _Block) -> torch.Tensor:
        """``[rows, heads + 2 * kv_heads, head_dim]``, contiguous: Q and K rotated, V as it is."""
        weights = self._weights
        qkv = qkv.view(len(qkv), -1, weights.head_dim)
        half, rotating = weights.head_dim // 2, weights.heads + weights.kv_heads
        rotated = qkv.new_empty(qkv.shape)
        source, target = qkv[:, :rotating], rotated[:, :rotating]
        torch.mul(source, block.cos, out=target)
        target[..., :half].addcmul_(source[..., half:], block.sin[..., :half], value=-1)
        target[..., half:].addcmul_(source[..., :half], block.sin[..., half:])
        rotated[:, rotating:].copy_(qkv[:, rotating:])
        return rotated

    def _write(self, kv: torch.Tensor, group: RowGroup, layer: int) -> None:
        """Put rows ``[rows, 2 * kv_heads, head_dim]`` into their slots."""
        rows = kv.view(len(kv), 2, -1, kv.shape[-1]).permute(1, 2, 0, 3)
        group.buffer.data[layer][:, :, group.slots] = rows

    def _logits(self, hidden: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        count = len(logit_rows)
        if count == 0:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        choice = self._rows.choose(count)
        rows = _padded(logit_rows, max(0, choice.min_rows - count)).to(self.device)
        weights = self._weights
        normed = functional.rms_norm(
            hidden[rows], hidden.shape[1:], weights.final_norm, weights.norm_eps
        )
        return weights.head.apply(normed, choice.kernel)[:count].float()
