"""Which architectures the packed forward works for, from their configuration and one probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.layout import KvLayout, kv_dtype
from rakv_cluster.model.attention import refuse_unsupported

_PROBE_BACKEND = "rakv_probe"
_PROBE_KWARG = "rakv_calls"
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

# A configuration attribute that is set to something true, and what it says about the model.
_REFUSED_ATTRIBUTES = {
    "is_encoder_decoder": "it is an encoder-decoder",
    "add_cross_attention": "it has cross attention",
    "cross_attention_layers": "it has cross attention",
    "alibi": "it has ALiBi instead of rotary positions",
    "kv_lora_rank": "it has latent attention (MLA), whose cached state is not K and V per head",
    "use_bidirectional_attention": "it attends to later tokens",
    "layers_block_type": "it has recurrent or state-space layers",
    "mamba_d_state": "it has recurrent or state-space layers",
    "ssm_state_size": "it has recurrent or state-space layers",
    "num_kv_shared_layers": "some of its layers share another layer's KV",
    "attn_logit_softcapping": "its attention logits are soft-capped",
}


def check_config(config: PreTrainedConfig) -> None:
    """Raise :class:`UnsupportedModel`, saying why, for an architecture that cannot work.

    Reads the configuration only, so that a wrong model is refused before its weights are loaded.
    What a configuration does not reveal is left to :func:`observe_layout` and the self-check.
    """
    for attribute, reason in _REFUSED_ATTRIBUTES.items():
        if getattr(config, attribute, None):
            raise _unsupported(config, f"{reason} ({attribute} is set)")
    if getattr(config, "is_causal", True) is False:
        raise _unsupported(config, "it attends to later tokens (is_causal is false)")
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if others:
        raise _unsupported(config, f"its layers are of type {', '.join(sorted(others))}")
    if not _rope_types(config):
        raise _unsupported(config, "it has no rotary positions (no rope_parameters)")


def supported_context_tokens(config: PreTrainedConfig) -> int:
    """Most positions a sequence may have.

    RoPE types whose frequencies depend on the longest sequence in the step ("dynamic",
    "longrope") are capped at the length they were trained for, where the frequencies are fixed:
    beyond it a sequence's output would depend on what else is in its batch.
    """
    limit = int(config.max_position_embeddings)
    if not length_dependent_rope(config):
        return limit
    trained = [
        int(value)
        for parameters in _rope_parameters(config)
        if (value := parameters.get("original_max_position_embeddings"))
    ]
    return min([limit, *trained])


def length_dependent_rope(config: PreTrainedConfig) -> bool:
    """Whether rotary frequencies depend on how long the sequence is."""
    return bool(_rope_types(config) & _LENGTH_DEPENDENT_ROPE)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """All sets of RoPE parameters: one per model, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def _rope_types(config: PreTrainedConfig) -> set[str]:
    return {str(item.get("rope_type", "default")) for item in _rope_parameters(config)}


def _unsupported(config: PreTrainedConfig, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"model type {config.model_type!r} is not supported: {reason}")


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """One layer's call of the attention function during the probe."""

    layer: int
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    window: int | None


def observe_layout(model: PreTrainedModel) -> KvLayout:
    """The KV layout that ``model`` really has, from one probe forward of two tokens.

    Raises :class:`UnsupportedModel` where a layer does not call the attention function exactly
    once, K and V differ in shape or between layers, or a sliding window is not handed on.
    """
    calls: list[_AttentionCall] = []
    before = model.config._attn_implementation
    model.set_attn_implementation(_PROBE_BACKEND)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=False, **{_PROBE_KWARG: calls})
    finally:
        model.set_attn_implementation(before)
    config = model.config.get_text_config()
    shapes = {shape for call in calls for shape in (call.key_shape, call.value_shape)}
    if [call.layer for call in calls] != list(range(config.num_hidden_layers)):
        raise _unsupported(config, "not every layer calls the attention function once")
    if len(shapes) != 1:
        raise _unsupported(config, f"K and V are not of one shape in all layers: {sorted(shapes)}")
    for call in calls:
        _check_window(config, call)
    _, kv_heads, _, head_dim = shapes.pop()
    return KvLayout(len(calls), kv_heads, head_dim, kv_dtype(model.dtype))


def _check_window(config: PreTrainedConfig, call: _AttentionCall) -> None:
    """A window that transformers would put into a mask only would be lost: no mask is built."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is not None:
        expected = window if types[call.layer] == "sliding_attention" else None
    else:
        expected = window if getattr(config, "use_sliding_window", True) else None
    if call.window != expected:
        raise _unsupported(
            config, f"layer {call.layer} passes window {call.window}, expected {expected}"
        )


def _record_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of the probe: notes the call, returns zeros of the right shape."""
    refuse_unsupported(kwargs)
    calls = kwargs.get(_PROBE_KWARG)
    if not isinstance(calls, list):
        raise UnsupportedModel("the model does not pass forward keywords on to its attention")
    layer = getattr(module, "layer_idx", -1)
    calls.append(_AttentionCall(layer, tuple(key.shape), tuple(value.shape), sliding_window))
    return torch.zeros_like(query.transpose(1, 2)), None


AttentionInterface.register(_PROBE_BACKEND, _record_call)
