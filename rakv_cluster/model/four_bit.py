"""A Llama-type model's weights in four bits: a decoder that reads a seventh of the bytes.

Good for guesses alone. It runs over the KV of the model that it was made from, so a draft needs no
prompt of its own computed, and it shares that model's embedding, norms and rotary table.

Each group of :data:`GROUP` inputs of an output has a scale and a zero in bfloat16; activations are
rounded to bfloat16 for the product (``aten::_weight_int4pack_mm_for_cpu``) and stay in the model's
dtype between products. Attention is computed as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import Kernel, Linear
from rakv_cluster.model.llama import Layer, LlamaWeights
from rakv_cluster.model.step import Runner

GROUP = 32
"""Inputs that share a scale: the smallest that the kernel knows, for the least rounding."""

_OUTPUT_MULTIPLE = 16
_LEVELS = 15
_MIDDLE = 8
_KERNEL_TILES = 1
"""An argument of the packing operator that the CPU's layout does not depend on."""

_PRODUCT_TOLERANCE = 2e-2
"""Of the largest result, between the kernel and the product of what its weights stand for."""


@dataclass(slots=True, eq=False)
class FourBitLinear(Linear):
    """``weight`` is uint8 ``[padded, in / 2]`` in the kernel's order, ``scales`` ``[in / GROUP,
    padded, 2]`` holds scale and zero; the first ``columns`` outputs are meant."""

    scales: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    columns: int = 0

    @classmethod
    def of(cls, linear: Linear) -> FourBitLinear:
        """The nearest four-bit weight; raises ``RuntimeError`` where PyTorch cannot pack it."""
        padding = -linear.outputs % _OUTPUT_MULTIPLE
        levels, scales = _quantized(functional.pad(linear.weight, (0, 0, 0, padding)))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, _KERNEL_TILES)
        return cls(packed, linear.bias, scales=scales, columns=linear.outputs)

    @property
    def outputs(self) -> int:
        """Columns of a result."""
        return self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of levels and scales."""
        return self.weight.nbytes + self.scales.nbytes

    def apply(self, x: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``, in the dtype of ``x``; there is but one kernel."""
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self.weight, GROUP, self.scales
        )
        result = product[:, : self.columns].to(x.dtype, memory_format=torch.contiguous_format)
        return result if self.bias is None else result.add_(self.bias)


def four_bit_runner(runner: Runner) -> FusedLlamaRunner:
    """A decoder with ``runner``'s weights in four bits, for the same KV buffers.

    Takes some seconds and 0.6 bytes a weight. Raises :class:`UnsupportedModel` unless ``runner`` is
    the fused decoder on a CPU whose PyTorch has the product.
    """
    if not isinstance(runner, FusedLlamaRunner) or runner.device.type != "cpu":
        raise UnsupportedModel("four-bit weights need the fused decoder on a CPU")
    if runner.layout.torch_dtype == torch.float16:
        # bfloat16 holds numbers that overflow there, and not-a-number in a slot is for ever.
        raise UnsupportedModel("four-bit weights need a model in float32 or bfloat16")
    try:
        weights = _four_bit(runner.weights)
    except RuntimeError as error:  # no such operator in this build, or a shape it does not take
        raise UnsupportedModel(
            f"this model's weights cannot be had in four bits: {error}"
        ) from error
    _check(runner.weights.layers[0].down, weights.layers[0].down)
    return FusedLlamaRunner(weights)


def _four_bit(weights: LlamaWeights) -> LlamaWeights:
    return replace(
        weights,
        layers=tuple(_layer(layer) for layer in weights.layers),
        head=FourBitLinear.of(weights.head),
    )


def _layer(layer: Layer) -> Layer:
    return replace(
        layer,
        qkv=FourBitLinear.of(layer.qkv),
        output=FourBitLinear.of(layer.output),
        gate_up=FourBitLinear.of(layer.gate_up),
        down=FourBitLinear.of(layer.down),
    )


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels int32 ``[out, in]`` in 0..15, scales and zeros: (level - 8) * scale + zero."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise UnsupportedModel(f"four-bit weights come in groups of {GROUP}, not {inputs} inputs")
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _LEVELS).clamp_(min=1e-8).to(torch.bfloat16)
    zero = (low + _MIDDLE * scale).to(torch.bfloat16)
    levels = (groups - zero.float()[..., None]).div_(scale.float()[..., None]).add_(_MIDDLE)
    levels = levels.round_().clamp_(0, _LEVELS).to(torch.int32).view(outputs, inputs)
    return levels, torch.stack([scale, zero], -1).transpose(0, 1).contiguous()


def _check(linear: Linear, made: Linear) -> None:
    """Raise :class:`UnsupportedModel` unless the kernel computes what its weights stand for."""
    levels, scales = _quantized(linear.weight)
    scale, zero = scales.float().transpose(0, 1).unbind(-1)
    groups = levels.view(*scale.shape, GROUP) - _MIDDLE
    meant = (groups * scale[..., None] + zero[..., None]).view(linear.weight.shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, linear.weight.shape[1], generator=generator)
    expected = functional.linear(x, meant, linear.bias)
    error = float((made.apply(x, Kernel.PLAIN) - expected).abs().max() / expected.abs().max())
    if not error <= _PRODUCT_TOLERANCE:  # also refuses NaN
        raise UnsupportedModel(f"the four-bit product is off by {error:.3g} on this machine")
