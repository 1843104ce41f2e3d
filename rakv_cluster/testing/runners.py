"""Tiny models with the runners that serve them, for tests that hold for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from transformers import PreTrainedModel

from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.llama import llama_weights
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.step import Runner
from rakv_cluster.testing.tiny_models import tiny_gemma3, tiny_llama

_CONTEXT_TOKENS = 2048

Case: TypeAlias = tuple[Callable[[], PreTrainedModel], Callable[[PreTrainedModel], Runner]]


def generic_runner(model: PreTrainedModel) -> Runner:
    """Through transformers' own layers, as any model."""
    return TransformersRunner(model, observe_layout(model), context_tokens=_CONTEXT_TOKENS)


def fused_runner(model: PreTrainedModel) -> Runner:
    """The decoder for Llama-type models."""
    return FusedLlamaRunner(llama_weights(model))


RUNNER_CASES: Mapping[str, Case] = MappingProxyType(
    {
        "llama": (tiny_llama, generic_runner),
        "llama-fused": (tiny_llama, fused_runner),
        "gemma3": (tiny_gemma3, generic_runner),
    }
)
"""By name, how a model is made and what runs it."""
