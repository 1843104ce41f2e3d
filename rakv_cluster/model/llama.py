"""Weights of a Llama-type model, merged as the fused decoder wants them, and its rotary tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.layout import KvLayout, kv_dtype
from rakv_cluster.model.linear import Linear
from rakv_cluster.model.row_attention import HeadShape

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
    shape: HeadShape
    norm_eps: float
    context_tokens: int

    @property
    def linears(self) -> list[Linear]:
        """Every product of a forward, in the order in which they run."""
        return [linear for layer in self.layers for linear in layer.linears] + [self.head]

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV these weights make."""
        return KvLayout(
            len(self.layers),
            self.shape.kv_heads,
            self.shape.head_dim,
            kv_dtype(self.embedding.dtype),
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
        shape=HeadShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
        ),
        norm_eps=base.norm.variance_epsilon,
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
        self._cos = self._sin = weights.embedding.new_empty(0, weights.shape.head_dim)

    def rows(self, positions: torch.Tensor, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[T, 1, head_dim]``; all positions are below ``needed``."""
        if needed > self._cos.shape[0]:
            stop = -(-needed // self._piece_tokens) * self._piece_tokens
            every = torch.arange(stop, device=self._like.device)[None]
            cos, sin = self._rotary(self._like, every)
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
