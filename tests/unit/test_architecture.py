"""Which architectures are refused, and why; which ones pass the self-check."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers import LlamaForCausalLM, PreTrainedConfig

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.architecture import (
    check_config,
    observe_layout,
    supported_context_tokens,
)
from rakv_cluster.model.self_check import build_runner
from rakv_cluster.testing.tiny_models import tiny_gemma3, tiny_llama

ROPE = {"rope_type": "default", "rope_theta": 1e4}

REFUSED: list[tuple[PreTrainedConfig, str]] = [
    (hf.GPT2Config(), "no rotary positions"),
    (hf.OPTConfig(), "no rotary positions"),
    (hf.BloomConfig(), "no rotary positions"),
    (hf.FalconConfig(alibi=True), "ALiBi"),
    (hf.T5Config(), "encoder-decoder"),
    (hf.MambaConfig(), "layers are of type"),
    (hf.RwkvConfig(), "no rotary positions"),
    (hf.JambaConfig(), "layers are of type|recurrent"),
    (hf.BambaConfig(), "layers are of type|recurrent"),
    (hf.Qwen3NextConfig(), "layers are of type linear_attention"),
    (hf.Lfm2Config(full_attn_idxs=[2]), "layers are of type conv"),
    (hf.DeepseekV3Config(), "latent attention"),
    (hf.MllamaTextConfig(), "cross attention"),
    (hf.Gemma2Config(), "soft-capped"),
    (hf.Gemma3TextConfig(use_bidirectional_attention=True), "later tokens"),
    (hf.Gemma3nTextConfig(), "share another layer's KV"),
    (hf.Llama4TextConfig(), "layers are of type chunked_attention"),
]


@pytest.mark.parametrize(
    ("config", "reason"), REFUSED, ids=[config.model_type for config, _ in REFUSED]
)
def test_refused_by_configuration(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check_config(config)
    assert repr(config.model_type) in str(caught.value)


SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}

# Families whose layers differ from Llama's in some way: biases, norms, partial rotary, parallel
# blocks, experts, windows in every layer or in some.
WORKING = {
    "Mistral": {"sliding_window": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Phi3": {"sliding_window": 16},
    "Olmo2": {},
    "Granite": {},
    "Glm4": {"head_dim": 16},
    "Starcoder2": {"sliding_window": 16},
    "GPTNeoX": {},
    "Cohere2": {"sliding_window": 16},
    "SmolLM3": {},
    "Gemma": {"head_dim": 16},
}


@pytest.mark.parametrize("family", sorted(WORKING))
def test_passes_the_self_check(family: str) -> None:
    config = getattr(hf, f"{family}Config")(**SIZES, **WORKING[family])
    check_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(hf, f"{family}ForCausalLM")(config).eval()

    built = build_runner(model, context_tokens=supported_context_tokens(config))

    assert built.error < 1e-4
    assert built.runner.layout.head_dim == 16


def test_refuses_layers_of_different_shape() -> None:
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 16, bias=False)
    attention.v_proj = torch.nn.Linear(64, 16, bias=False)
    with pytest.raises(UnsupportedModel, match="not of one shape"):
        observe_layout(model)


def test_refuses_values_narrower_than_keys() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.v_proj = torch.nn.Linear(64, 16, bias=False)
    with pytest.raises(UnsupportedModel, match="not of one shape"):
        observe_layout(model)


def test_refuses_a_window_that_is_only_in_the_mask() -> None:
    model = tiny_gemma3()
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layer 2 passes window None, expected 16"):
        observe_layout(model)


def test_refuses_a_model_that_drops_forward_keywords() -> None:
    model = tiny_llama()
    inner = model.model.forward

    def forward(input_ids: torch.Tensor, **_dropped: object) -> object:
        return inner(input_ids=input_ids, use_cache=False)

    model.model.forward = forward
    with pytest.raises(UnsupportedModel, match="does not pass forward keywords on"):
        observe_layout(model)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = tiny_llama()
    before = model.config._attn_implementation
    observe_layout(model)
    assert model.config._attn_implementation == before


def _carry_state(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Every row sees the rows before it in the same forward, as a recurrent layer's would."""
    return output.cumsum(dim=1)


def _drift(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output + output.shape[1] * 0.1


@pytest.mark.parametrize("hook", [_carry_state, _drift])
def test_the_self_check_finds_rows_that_depend_on_their_batch(hook: object) -> None:
    model: LlamaForCausalLM = tiny_llama()
    model.model.layers[0].mlp.register_forward_hook(hook)
    with pytest.raises(UnsupportedModel, match="differ from the stock forward"):
        build_runner(model, context_tokens=512)


def test_the_self_check_refuses_nan() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(UnsupportedModel, match="differ from the stock forward by nan"):
        build_runner(model, context_tokens=512)


class TestContextTokens:
    def test_is_the_models_own_limit(self) -> None:
        assert supported_context_tokens(hf.LlamaConfig(max_position_embeddings=777)) == 777

    def test_fixed_scaling_keeps_the_extended_limit(self) -> None:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        config = hf.LlamaConfig(max_position_embeddings=2048, rope_parameters=rope)
        assert supported_context_tokens(config) == 2048

    def test_length_dependent_rope_is_capped_where_it_is_constant(self) -> None:
        rope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
        }
        config = hf.Phi3Config(
            **SIZES | {"max_position_embeddings": 4096},
            rope_parameters=rope,
            original_max_position_embeddings=512,
        )
        assert supported_context_tokens(config) == 512

    def test_dynamic_rope_is_capped_at_what_it_grows_from(self) -> None:
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        config = hf.LlamaConfig(max_position_embeddings=512, rope_parameters=rope)
        assert supported_context_tokens(config) == 512
