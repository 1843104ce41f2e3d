"""A sequence's KV in memory, and the pool such buffers are leased from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from rakv_cluster.kv.layout import KvLayout


@dataclass(slots=True, eq=False)
class KvBuffer:
    """KV slots of one sequence; slot ``p`` belongs to position ``p``.

    ``data`` is ``[layers, 2, kv_heads, capacity, head_dim]``. Slots below ``length`` hold verified
    KV; slots from ``length`` on are zero or left over from rejected drafts, and are never stored
    or shared.
    """

    data: torch.Tensor
    length: int = 0

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.data.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of ``data``."""
        return self.data.numel() * self.data.element_size()

    def keys(self, layer: int) -> torch.Tensor:
        """``[kv_heads, capacity, head_dim]``, a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """``[kv_heads, capacity, head_dim]``, a view."""
        return self.data[layer, 1]

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """``[layers, 2, kv_heads, stop - start, head_dim]``, a view."""
        return self.data[:, :, :, start:stop]


class BufferPool:
    """Leases :class:`KvBuffer` within a byte budget.

    Capacities are rounded up to ``granule_tokens`` so that a few sizes are reused instead of
    fragmenting the heap; at most ``spare_buffers`` returned buffers are kept for that. Slots are
    zeroed on lease: attention may read a rounded length, and weight 0 times NaN is NaN. Used by
    the engine thread only.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        budget_bytes: int,
        device: torch.device,
        granule_tokens: int = 256,
        spare_buffers: int = 4,
    ) -> None:
        self._layout = layout
        self._budget_bytes = budget_bytes
        self._device = device
        self._granule_tokens = granule_tokens
        self._spares: deque[torch.Tensor] = deque()
        self._spare_limit = spare_buffers
        self._leased: dict[int, int] = {}

    @property
    def leased_bytes(self) -> int:
        """Bytes of all buffers out on lease."""
        return sum(self._leased.values())

    @property
    def budget_bytes(self) -> int:
        """Most bytes that may be out on lease at once."""
        return self._budget_bytes

    def lease_bytes(self, tokens: int) -> int:
        """Bytes that a lease for ``tokens`` slots accounts for."""
        return self._rounded(tokens) * self._layout.bytes_per_token

    def can_lease(self, tokens: int) -> bool:
        """Whether :meth:`lease` would succeed now."""
        return self.leased_bytes + self.lease_bytes(tokens) <= self._budget_bytes

    def lease(self, tokens: int) -> KvBuffer:
        """A zeroed buffer of at least ``tokens`` slots; raises ``MemoryError`` over budget."""
        if not self.can_lease(tokens):
            raise MemoryError(f"no KV memory for {tokens} tokens within {self._budget_bytes} bytes")
        buffer = KvBuffer(self._take(self._rounded(tokens)))
        self._leased[id(buffer)] = buffer.nbytes
        return buffer

    def release(self, buffer: KvBuffer) -> None:
        """Return a lease; raises ``KeyError`` for a buffer that is not out on lease."""
        del self._leased[id(buffer)]
        self._spares.append(buffer.data)
        if len(self._spares) > self._spare_limit:
            self._spares.popleft()

    def discard(self, buffer: KvBuffer) -> None:
        """End a lease without taking the memory back: somebody may still write to it.

        It is freed when the last reference is gone. Raises ``KeyError`` like :meth:`release`.
        """
        del self._leased[id(buffer)]

    def _rounded(self, tokens: int) -> int:
        return -(-max(tokens, 1) // self._granule_tokens) * self._granule_tokens

    def _take(self, capacity: int) -> torch.Tensor:
        for index, spare in enumerate(self._spares):
            if spare.shape[3] == capacity:
                del self._spares[index]
                return spare.zero_()
        return torch.zeros(
            self._layout.shape(capacity), dtype=self._layout.torch_dtype, device=self._device
        )
