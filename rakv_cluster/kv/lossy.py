"""Half and 8-bit forms of KV, for approximate reuse only. numpy on raw bits, no torch.

int8 has one scale per head and channel for K, whose channels differ in size for all tokens alike,
and one per head and token for V (KIVI, Liu et al., 2024; measured in research/pic.md). Values that
either form cannot hold must be kept losslessly: see :func:`fits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rakv_cluster.kv.layout import KvDtype

LARGEST = 65504.0
"""The largest finite float16. int8 could hold more, at a precision that serves nobody."""

Floats = npt.NDArray[np.float32]
_STEPS = 127.0


@dataclass(frozen=True, slots=True)
class Quantized:
    """One layer, ``[2, kv_heads, n, head_dim]``: ``values`` int8 of that shape, float32
    ``key_scales`` ``[kv_heads, 1, head_dim]`` and ``value_scales`` ``[kv_heads, n, 1]``."""

    values: npt.NDArray[np.int8]
    key_scales: Floats
    value_scales: Floats


def to_floats(bits: np.ndarray, dtype: KvDtype) -> Floats:
    """Raw bits as float32; exact for all three dtypes."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bits(values: Floats, dtype: KvDtype) -> np.ndarray:
    """Finite float32 as the nearest value's raw bits, ties to even."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def fits(values: Floats) -> bool:
    """Whether all values are finite and at most :data:`LARGEST` in size."""
    return bool((np.abs(values) <= LARGEST).all())  # a comparison with NaN is false


def quantize(layer: Floats) -> Quantized:
    """Round to the nearest step: no value moves by more than half its scale."""
    keys, values = np.abs(layer[0]), np.abs(layer[1])
    key_scales = (keys.max(axis=1, keepdims=True, initial=0.0) / _STEPS).astype(np.float32)
    value_scales = (values.max(axis=2, keepdims=True, initial=0.0) / _STEPS).astype(np.float32)
    steps = np.empty(layer.shape, np.int8)
    for index, scales in enumerate((key_scales, value_scales)):
        # A scale may be so small that it is rounded to nothing; so are its values.
        divisor = np.where(scales > 0, scales, np.float32(1))
        steps[index] = np.rint(np.clip(layer[index] / divisor, -_STEPS, _STEPS)).astype(np.int8)
    return Quantized(steps, key_scales, value_scales)


def dequantize(quantized: Quantized) -> Floats:
    """The values that the steps stand for."""
    layer = quantized.values.astype(np.float32)
    layer[0] *= quantized.key_scales
    layer[1] *= quantized.value_scales
    return layer
