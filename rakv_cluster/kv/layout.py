"""Shape and dtype of a model's KV, and its raw bits.

Importing this does not import torch: the store's actors know shapes and never see a tensor, and
torch would cost each of their processes 2.4 s of CPU and 180 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

KvDtype = Literal["float32", "bfloat16", "float16"]

_KV_DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "float16")

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
        import torch  # noqa: PLC0415  # see the module's docstring

        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            self.dtype
        ]

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the KV of ``tokens`` tokens."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)


def kv_dtype(dtype: torch.dtype) -> KvDtype:
    """Name of a torch dtype; raises ``ValueError`` for one that KV cannot have."""
    for name in _KV_DTYPES:
        if str(dtype) == f"torch.{name}":
            return name
    raise ValueError(f"KV cannot be stored as {dtype}")


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as unsigned integers (uint16 or uint32), sharing its memory.

    numpy has no bfloat16; codec and store move bits and never do arithmetic on them.
    """
    import torch  # noqa: PLC0415  # see the module's docstring

    if tensor.element_size() == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.int32).numpy().view(np.uint32)
