"""A chunk of KV with everything that must be known to use it again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rakv_cluster.kv.layout import KvLayout


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk to store. ``kv`` are the raw bits (``kv.layout.bits``), shape ``layout.shape(n)``.

    ``key`` and ``namespace`` have 32 bytes; ``start`` is the position of the first token;
    ``cost_ms`` what computing it took; ``numeric_class`` names device type, kernels, threads, grid
    and dtype that made it; ``created_s`` is wall-clock time.
    """

    key: bytes
    namespace: bytes
    token_ids: tuple[int, ...]
    start: int
    layout: KvLayout
    kv: np.ndarray
    cost_ms: float
    numeric_class: str
    created_s: float

    @property
    def lossless(self) -> bool:
        """Always: this is KV as it was computed."""
        return True
