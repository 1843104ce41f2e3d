"""Shape and dtype of a model's KV, and its raw bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

KvDtype = Literal["float32", "bfloat16", "float16"]

_TORCH: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TORCH_BITS = {2: torch.int16, 4: torch.int32}

LAYOUT_VERSION = 1
"""Part of every namespace: bump it when the meaning of stored KV changes."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV of ``n`` tokens is one array ``[layers, 2, kv_heads, n, head_dim]``; index 1 is K, V."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, uncompressed."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of KV tensors."""
        return _TORCH[self.dtype]

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV of ``tokens`` tokens."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)


def kv_dtype(dtype: torch.dtype) -> KvDtype:
    """Name of a torch dtype; raises ``ValueError`` for one that KV cannot have."""
    for name, candidate in _TORCH.items():
        if candidate == dtype:
            return name  # type: ignore[return-value]  # the keys of _TORCH are KvDtype's values
    raise ValueError(f"KV cannot be stored as {dtype}")


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as unsigned integers (uint16 or uint32), sharing its memory.

    numpy has no bfloat16; codec and store move bits and never do arithmetic on them.
    """
    raw = tensor.view(_TORCH_BITS[tensor.element_size()]).numpy()
    return raw.view(np.uint16 if tensor.element_size() == 2 else np.uint32)
