"""Which runner serves a model: the fused decoder where it provably equals the generic path."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import (
    PLAIN_ROWS,
    UNIFORM_ROWS,
    Kernel,
    measure_costs,
    pack_all,
    plan_rows,
    unpack_all,
    usable_kernels,
)
from rakv_cluster.model.llama import LlamaWeights, llama_weights
from rakv_cluster.model.native_runner import NativeLlamaRunner
from rakv_cluster.model.numerics import Numerics, observe_numerics
from rakv_cluster.model.self_check import build_runner, check_step, largest_error
from rakv_cluster.model.step import Runner

log = logging.getLogger(__name__)

# Largest difference between fused and generic logits that is taken for rounding, relative to the
# largest logit. float32 shows 1e-5: sums run in another order.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What :func:`choose_runner` may use.

    ``fused`` "auto" takes the fused decoder where the self-check passes, "on" refuses to start
    without it. A second copy of the weights, in the CPU kernels' own order, is kept if it fits
    ``packed_budget_bytes`` (0: never). ``numerics`` "uniform" wants logits whose bits do not depend
    on batching, speculation, prefill pieces or reuse (needs the packed copy); "fast" picks the
    fastest PyTorch kernel for each number of rows, and logits differ by rounding. ``native`` "auto"
    runs uniform steps of few rows on kernels compiled at load, where there is a GCC and they agree
    with the packed products bit for bit.
    """

    fused: Literal["auto", "on", "off"] = "auto"
    native: Literal["auto", "off"] = "auto"
    numerics: Literal["uniform", "fast"] = "uniform"
    packed_budget_bytes: int = 4 << 30


DEFAULT_KERNELS = KernelOptions()
"""Bitwise reproducible where this machine can, at the price of a second copy of the weights."""


@dataclass(frozen=True, slots=True)
class ChosenRunner:
    """A runner, the name of its kernels, its largest difference to the reference, its numerics."""

    runner: Runner
    kernels: str
    error: float
    numerics: Numerics


def choose_runner(
    model: PreTrainedModel, *, context_tokens: int, options: KernelOptions
) -> ChosenRunner:
    """The best checked runner over ``model``, which it takes over.

    Raises :class:`UnsupportedModel` where the generic path cannot run the model, or the fused one
    cannot although ``options.fused`` is "on".
    """
    generic = build_runner(model, context_tokens=context_tokens)
    if options.fused != "off":
        try:
            return _fused(model, generic.runner, options)
        except UnsupportedModel as error:
            if options.fused == "on":
                raise
            log.info("generic forward: %s", error.message)
    numerics = observe_numerics(generic.runner)
    return ChosenRunner(generic.runner, generic.kernels, generic.error, numerics)


def _fused(model: PreTrainedModel, generic: Runner, options: KernelOptions) -> ChosenRunner:
    ids, expected = check_step(generic)
    limit = _TOLERANCE[generic.layout.torch_dtype] * float(expected.abs().max())
    weights = replace(llama_weights(model), context_tokens=generic.context_tokens)
    errors = []
    for name, runner in _candidates(weights, options):
        error = largest_error(runner, ids, expected)
        errors.append(f"{name} {error:.3g}")
        if not error <= limit:  # also refuses NaN
            continue
        numerics = observe_numerics(runner)
        if name in _BITWISE and not numerics.bitwise:
            continue  # this machine's kernels round by row count after all
        return ChosenRunner(runner, f"fused[{name}]", error, numerics)
    unpack_all(weights.linears)
    raise UnsupportedModel(
        f"fused logits differ from generic ones by more than {limit:.3g}: {', '.join(errors)}"
    )


# Counted up whenever the kernels round differently: KV of another class is not reused.
_NATIVE, _UNIFORM = "uniform,native2", "uniform"
_BITWISE = (_NATIVE, _UNIFORM)


def _candidates(
    weights: LlamaWeights, options: KernelOptions
) -> Iterator[tuple[str, FusedLlamaRunner]]:
    """Variants of the fused decoder, the wanted one first, the plainest last."""
    if weights.embedding.device.type == "cpu":
        packed = pack_all(weights.linears, options.packed_budget_bytes)
        kernels = usable_kernels(weights.layers[0].gate_up)
        if options.numerics == "uniform" and packed and Kernel.PACKED in kernels:
            if options.native != "off":
                yield from _native(weights)
            yield _UNIFORM, FusedLlamaRunner(weights, rows=UNIFORM_ROWS, uniform=True)
        costs = measure_costs([layer.linears for layer in weights.layers], weights.head, kernels)
        rows = plan_rows(costs)
        yield str(rows), FusedLlamaRunner(weights, rows=rows)
        unpack_all(weights.linears)
    yield str(PLAIN_ROWS), FusedLlamaRunner(weights, rows=PLAIN_ROWS)


def _native(weights: LlamaWeights) -> Iterator[tuple[str, FusedLlamaRunner]]:
    try:
        runner = NativeLlamaRunner(weights)
    except UnsupportedModel as error:
        log.info("no native kernels: %s", error.message)
        return
    yield _NATIVE, runner
