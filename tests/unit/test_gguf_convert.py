"""GGUF to a model folder, on a tiny file written here: same logits, same tokens."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import LlamaForCausalLM

from rakv_cluster.errors import ConfigError
from rakv_cluster.model.gguf_convert import convert_gguf
from rakv_cluster.model.loader import load_model
from rakv_cluster.testing.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_llama

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# One merge of two spaces shows whether digits are split off before the GPT-2 pattern runs.
TWO_SPACES = "ĠĠ"


def gguf_weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """llama.cpp's names, and its order of rotary rows (halves interleaved)."""
    head_dim = model.config.head_dim
    found = {}
    for name, weight in model.state_dict().items():
        if name in OUTER_NAMES:
            found[OUTER_NAMES[name]] = weight
            continue
        _, _, layer, rest = name.split(".", 3)
        part = rest.removesuffix(".weight")
        rotated = part in {"self_attn.q_proj", "self_attn.k_proj"}
        found[f"blk.{layer}.{LAYER_NAMES[part]}.weight"] = (
            interleave(weight, head_dim) if rotated else weight
        )
    return found


def interleave(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from (first half, second half) to pairs."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, pre: str = "smollm") -> None:
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens[-1] = TWO_SPACES  # the vocabulary's size is the model's
    kinds = [TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in gguf_weights(model).items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, source: LlamaForCausalLM) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf", source)
    convert_gguf(folder / "tiny.gguf", folder / "out")
    return folder / "out"


def test_weights_are_the_same(converted: Path, source: LlamaForCausalLM) -> None:
    again = LlamaForCausalLM.from_pretrained(converted)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, source(ids).logits)


def test_the_folder_is_ordinary(converted: Path) -> None:
    card = load_model(str(converted)).card
    assert card.eos_token_ids == {2}
    assert "quantization_config" not in (converted / "config.json").read_text()
    assert "gguf" not in (converted / "config.json").read_text()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in converted.iterdir()}
    assert modes == {0o644}


def test_the_tokenizer_keeps_template_and_special_tokens(converted: Path) -> None:
    tokenizer = load_model(str(converted)).tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == SPECIAL_TOKENS
    assert tokenizer("a<|im_end|>").input_ids[-1] == 2


def test_digits_are_split_off_before_merges(converted: Path) -> None:
    tokenizer = load_model(str(converted)).tokenizer
    assert tokenizer("x  2").tokens() == ["x", TWO_SPACES, "2"]


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, source: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "tiny.gguf", source, pre="deepseek-llm")
    with pytest.raises(ConfigError, match="'deepseek-llm' cannot be converted faithfully"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
