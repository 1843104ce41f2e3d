"""From a model folder or Hugging Face id to a checked runner, a tokenizer and a card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rakv_cluster.errors import ConfigError
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.architecture import check_config, supported_context_tokens
from rakv_cluster.model.card import ModelCard, model_digest, tokenizer_digest
from rakv_cluster.model.fingerprint import weights_fingerprint
from rakv_cluster.model.quiet import no_progress_bars
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.selection import DEFAULT_KERNELS, KernelOptions, choose_runner
from rakv_cluster.model.step import Runner

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve. ``runner`` belongs to one thread; the rest may be shared.

    ``rotation`` moves its keys to other positions. ``refused_kernels`` are named in
    :class:`~rakv_cluster.model.selection.ChosenRunner`.
    """

    runner: Runner
    tokenizer: PreTrainedTokenizerFast
    card: ModelCard
    rotation: KeyRotation
    refused_kernels: tuple[str, ...]


def load_model(
    source: str,
    *,
    device: str = "cpu",
    dtype: DtypeName = "auto",
    threads: int | None = None,
    model_id: str | None = None,
    kernels: KernelOptions = DEFAULT_KERNELS,
) -> LoadedModel:
    """Load, check and describe the model at ``source``, a folder or a Hugging Face id.

    ``dtype`` "auto" is float32 on the CPU and bfloat16 elsewhere. ``threads`` sets torch's
    intra-op threads for the whole process. ``model_id`` is the name to serve it under (default:
    the folder's name or the id). ``kernels`` says what the forward may use. Raises
    :class:`ConfigError` if it cannot be found or read and :class:`UnsupportedModel` if the
    architecture cannot work or fails the self-check.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    where = _device(device)
    folder, config = _checked(source)
    tokenizer = load_tokenizer(str(folder))
    model = _load_weights(folder, config, _dtype(dtype, where)).to(where)
    built = choose_runner(model, context_tokens=supported_context_tokens(config), options=kernels)
    layout = built.runner.layout
    card = ModelCard(
        model_id=model_id or (folder.name if Path(source).is_dir() else source),
        digest=model_digest(
            weights=weights_fingerprint(folder),
            config=json.loads(config.to_json_string(use_diff=False)),
            layout=layout,
            tokenizer=tokenizer_digest(tokenizer),
        ),
        context_tokens=built.runner.context_tokens,
        vocab_size=built.runner.vocab_size,
        layout=layout,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        numeric_class=numeric_class(built.kernels, where, layout),
        self_check_error=built.error,
        near_tie_eps=built.numerics.near_tie_eps,
    )
    rotation = key_rotation(model, built.runner)
    return LoadedModel(built.runner, tokenizer, card, rotation, built.refused)


def check_model(source: str, *, device: str = "cpu") -> None:
    """Raise what :func:`load_model` would for a model or device that is not there, and for an
    architecture that cannot work. Downloads a Hugging Face model, reads no weights."""
    _device(device)
    _checked(source)


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """The tokenizer at ``source``, a folder or a Hugging Face id; raises :class:`ConfigError`."""
    folder = local_folder(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"the tokenizer in {folder} is not a fast (tokenizers) one")
    return tokenizer


def local_folder(source: str) -> Path:
    """``source`` itself if it is a folder, else the local snapshot of that Hugging Face id.

    Downloads what is missing. Raises :class:`ConfigError` if it is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model {source!r} is no folder, no name that `rakv model list` shows, and cannot be "
            f"fetched from the hub: {reason}",
            field="model",
        ) from error


def numeric_class(kernels: str, device: torch.device, layout: KvLayout) -> str:
    """Name of the set of replicas that round alike: kernels, device type, threads and dtype."""
    version = torch.__version__.split("+")[0]
    threads = f"{torch.get_num_threads()}t" if device.type == "cpu" else "any"
    return f"{kernels}/{device.type}-torch{version}/{threads}/{layout.dtype}"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", field="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but there is no usable GPU", field="device")
    return device


def _dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(_DTYPES)}", field="dtype")
    return _DTYPES[name]


def _checked(source: str) -> tuple[Path, PreTrainedConfig]:
    """The model's folder and its configuration, of an architecture that can work."""
    folder = local_folder(source)
    config = _load_config(folder)
    check_config(config)
    return folder, config


def _load_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the model in {folder}: {error}", field="model") from error


def _load_weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with all of its weights: transformers fills missing ones with random numbers."""
    try:
        with no_progress_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the weights in {folder}: {error}", field="model") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"the weights in {folder} lack {missing}", field="model")
    loaded: PreTrainedModel = model
    return loaded


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Every id that one of tokenizer, generation config and config calls the end of a text."""
    found: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        model.generation_config.eos_token_id if model.generation_config else None,
        model.config.get_text_config().eos_token_id,
    ):
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)
