"""Which runner serves a model: the fused decoder where it provably equals the generic path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.graphs import GraphedLlamaRunner, recorder_for
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
    with the packed products bit for bit. ``cuda_graphs`` replays steps of few rows as CUDA graphs
    (:mod:`rakv_cluster.model.graphs`); where they cannot be recorded, steps run as without.
    """

    fused: Literal["auto", "on", "off"] = "auto"
    native: Literal["auto", "off"] = "auto"
    numerics: Literal["uniform", "fast"] = "uniform"
    packed_budget_bytes: int = 4 << 30
    cuda_graphs: bool = False


DEFAULT_KERNELS = KernelOptions()
"""Bitwise reproducible where this machine can, at the price of a second copy of the weights."""


@dataclass(frozen=True, slots=True)
class ChosenRunner:
    """A runner, the name of its kernels, its largest difference to the reference, its numerics.

    ``refused`` names the kernels that were tried before and could not be made or failed a check.
    """

    runner: Runner
    kernels: str
    error: float
    numerics: Numerics
    refused: tuple[str, ...]


def choose_runner(
    model: PreTrainedModel, *, context_tokens: int, options: KernelOptions
) -> ChosenRunner:
    """The best checked runner over ``model``, which it takes over.

    Raises :class:`UnsupportedModel` where the generic path cannot run the model, or the fused one
    cannot although ``options.fused`` is "on".
    """
    generic = build_runner(model, context_tokens=context_tokens)
    refused: list[str] = []
    if options.fused != "off":
        try:
            return _fused(model, generic.runner, options, refused)
        except UnsupportedModel as error:
            if options.fused == "on":
                raise
            log.info("generic forward: %s", error.message)
    numerics = observe_numerics(generic.runner)
    return ChosenRunner(generic.runner, generic.kernels, generic.error, numerics, tuple(refused))


def _fused(
    model: PreTrainedModel, generic: Runner, options: KernelOptions, refused: list[str]
) -> ChosenRunner:
    """The first variant that passes; adds the names of those before it to ``refused``."""
    ids, expected = check_step(generic)
    limit = _TOLERANCE[generic.layout.torch_dtype] * float(expected.abs().max())
    weights = replace(llama_weights(model), context_tokens=generic.context_tokens)
    reasons = []
    for name, build in _candidates(weights, options):
        try:
            runner = build()
            error, numerics = _checked(name, runner, ids, expected, limit)
        except UnsupportedModel as reason:
            refused.append(name)
            reasons.append(f"{name}: {reason.message}")
            log.warning("kernels %s are not used: %s", name, reason.message)
            continue
        return ChosenRunner(runner, f"fused[{name}]", error, numerics, tuple(refused))
    unpack_all(weights.linears)
    raise UnsupportedModel(f"no fused decoder: {', '.join(reasons)}")


def _checked(
    name: str, runner: Runner, ids: torch.Tensor, expected: torch.Tensor, limit: float
) -> tuple[float, Numerics]:
    """Largest difference to the generic logits, and the numerics.

    Raises :class:`UnsupportedModel` where either is not what ``name`` promises.
    """
    error = largest_error(runner, ids, expected)
    if not error <= limit:  # also refuses NaN
        raise UnsupportedModel(f"logits differ from generic ones by {error:.3g} > {limit:.3g}")
    numerics = observe_numerics(runner)
    if name in _BITWISE and not numerics.bitwise:
        raise UnsupportedModel("this machine's kernels round by row count after all")
    # Two ways may each be off by the limit. This sees every row count that the first check skips.
    if not numerics.spread <= 2 * limit:
        raise UnsupportedModel(f"logits vary by {numerics.spread:.3g} with the rows of a step")
    return error, numerics


# Counted up whenever the kernels round differently: KV of another class is not reused.
_NATIVE, _UNIFORM, _GRAPHS = "uniform,native2", "uniform", "plain,graphs"
_BITWISE = (_NATIVE, _UNIFORM)

_Candidate = tuple[str, Callable[[], FusedLlamaRunner]]


def _candidates(weights: LlamaWeights, options: KernelOptions) -> Iterator[_Candidate]:
    """Variants of the fused decoder, the wanted one first, the plainest last; making one may raise
    :class:`UnsupportedModel`."""
    device = weights.embedding.device
    if options.cuda_graphs:
        yield _GRAPHS, lambda: GraphedLlamaRunner(weights, recorder_for(device))
    if device.type == "cpu":
        packed = pack_all(weights.linears, options.packed_budget_bytes)
        kernels = usable_kernels(weights.layers[0].gate_up)
        if options.numerics == "uniform" and packed and Kernel.PACKED in kernels:
            if options.native != "off":
                yield _NATIVE, lambda: NativeLlamaRunner(weights)
            yield _UNIFORM, lambda: FusedLlamaRunner(weights, rows=UNIFORM_ROWS, uniform=True)
        costs = measure_costs([layer.linears for layer in weights.layers], weights.head, kernels)
        rows = plan_rows(costs)
        yield str(rows), lambda: FusedLlamaRunner(weights, rows=rows)
        unpack_all(weights.linears)
    yield str(PLAIN_ROWS), lambda: FusedLlamaRunner(weights, rows=PLAIN_ROWS)
