"""Tiny random models and a byte tokenizer: the real architectures at a thousandth of the size.

Weights are drawn wide enough that two logits are hardly ever close: a greedy choice does not
hang on rounding, so tests may compare tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall one of these as <tool_call>:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As ``CHAT_TEMPLATE``, and teaches tools as Hermes' and Qwen's do."""

_CONTEXT_TOKENS = 2048


def tiny_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte (ids from 3 on), three special tokens, a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=chat_template,
    )


def tiny_llama(seed: int = 0, *, layers: int = 2) -> LlamaForCausalLM:
    """A Llama with grouped-query attention (4 heads on 2), float32, untied head."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=_CONTEXT_TOKENS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _seeded(LlamaForCausalLM, config, seed)


def tiny_gemma3(
    seed: int = 0,
    *,
    window: int = 16,
    layer_types: Sequence[str] = ("sliding_attention", "full_attention", "sliding_attention"),
) -> Gemma3ForCausalLM:
    """A Gemma-3 (two RoPE bases); sliding layers see ``window`` tokens."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=window,
        layer_types=list(layer_types),
        max_position_embeddings=_CONTEXT_TOKENS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _seeded(Gemma3ForCausalLM, config, seed)


def _seeded(
    kind: type[PreTrainedModel], config: LlamaConfig | Gemma3TextConfig, seed: int
) -> PreTrainedModel:
    """Build with ``seed`` and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def save_tiny_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write ``model`` and ``tokenizer`` (default :func:`tiny_tokenizer`) as a model folder."""
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
