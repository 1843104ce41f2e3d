"""A GGUF file turned into an ordinary transformers folder: safetensors, config, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rakv_cluster.errors import ConfigError
from rakv_cluster.model.quiet import no_progress_bars

_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` to ``folder`` as float32 weights with its tokenizer, and check the result.

    Raises :class:`ConfigError` where the written folder does not load back to equal weights or
    the GGUF's tokenizer is of a kind this does not know to be converted faithfully.
    """
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        clean = _without_quantization(model)
        clean.save_pretrained(folder)
        _convert_tokenizer(gguf).save_pretrained(folder)
        _check_reload(clean, folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for its owner alone; a cache may be shared


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not remember its GGUF (it could not be saved)."""
    values = model.config.to_dict()
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(**values)
    clean = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    clean.generation_config = model.generation_config
    return clean


def _convert_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = GGUFReader(gguf).fields
    for name, field in _SPECIAL_TOKENS.items():
        if field in fields:
            token = tokenizer.convert_ids_to_tokens(int(fields[field].contents()))
            setattr(tokenizer, name, token)
    if "tokenizer.chat_template" in fields:
        tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    _restore_pre_tokenizer(tokenizer, _text(fields, "tokenizer.ggml.pre"))
    return tokenizer


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    """Put back what transformers' GGUF reader drops: how text is split before merges apply.

    "smollm" splits digits off one by one before the GPT-2 pattern runs; without that, spaces in
    front of a number merge otherwise than in the original ("x  2"). "default" is SentencePiece's,
    which the reader converts whole.
    """
    if kind == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif kind != "default":
        raise ConfigError(f"the GGUF's pre-tokenizer {kind!r} cannot be converted faithfully")


def _text(fields: dict[str, Any], name: str) -> str:
    return str(fields[name].contents()) if name in fields else "default"


def _check_reload(model: PreTrainedModel, folder: Path) -> None:
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    wanted = model.state_dict()
    if again.keys() != wanted.keys():
        raise ConfigError(f"{folder} does not load back to the same set of weights")
    for name, weight in wanted.items():
        if not torch.equal(weight, again[name]):
            raise ConfigError(f"{folder} does not load back to equal weights: {name}")
