"""A sequence's KV in memory, and the pool such buffers are leased from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rakv_cluster.kv.layout import KvLayout

Positions = npt.NDArray[np.int64]
"""Of a prompt's tokens, or figures that are counted in them: ``[n]``."""


def no_positions() -> Positions:
    """An empty array of them."""
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class KvBuffer:
    """KV slots of one sequence; slot ``p`` belongs to position ``p``.

    ``data`` is ``[layers, 2, kv_heads, capacity, head_dim]``. Slots below ``length`` hold verified
    KV; slots from ``length`` on hold finite left-overs (of rejected drafts, of an earlier lease),
    and are never stored, shared or attended to.
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
        return _nbytes(self.data)

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

    Capacities are rounded up to ``granule_tokens``. Returned memory is kept for later leases as
    long as leases and spares together stay within the budget, so a lease seldom waits for the
    system to hand out and clear pages; a spare serves a lease of at least half its capacity.

    Every slot of a lease holds a finite number, because attention may read a rounded length under
    a mask, and weight 0 times NaN is NaN: fresh memory is zero, and whoever may have written
    something else ends the lease with :meth:`discard`. Used by the engine thread only.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        budget_bytes: int,
        device: torch.device,
        granule_tokens: int = 256,
    ) -> None:
        self._layout = layout
        self._budget_bytes = budget_bytes
        self._device = device
        self._granule_tokens = granule_tokens
        self._spares: deque[torch.Tensor] = deque()
        self._leased: dict[int, int] = {}
        self._leased_bytes = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes of all buffers out on lease."""
        return self._leased_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory kept for later leases."""
        return sum(_nbytes(spare) for spare in self._spares)

    @property
    def budget_bytes(self) -> int:
        """Most bytes that may be out on lease at once."""
        return self._budget_bytes

    def lease_bytes(self, tokens: int) -> int:
        """Bytes that a fresh lease for ``tokens`` slots accounts for."""
        return self._rounded(tokens) * self._layout.bytes_per_token

    def can_lease(self, tokens: int) -> bool:
        """Whether :meth:`lease` would succeed now."""
        return self._leased_bytes + self.lease_bytes(tokens) <= self._budget_bytes

    def lease(self, tokens: int) -> KvBuffer:
        """A buffer of at least ``tokens`` slots; raises ``MemoryError`` over budget, and where the
        device has less memory left than the budget allows."""
        if not self.can_lease(tokens):
            raise MemoryError(f"no KV memory for {tokens} tokens within {self._budget_bytes} bytes")
        buffer = KvBuffer(self._take(self._rounded(tokens)))
        self._leased[id(buffer)] = buffer.nbytes
        self._leased_bytes += buffer.nbytes
        self._shed()
        return buffer

    def release(self, buffer: KvBuffer) -> None:
        """Return a lease; raises ``KeyError`` for a buffer that is not out on lease."""
        self.discard(buffer)
        self._spares.append(buffer.data)
        self._shed()

    def discard(self, buffer: KvBuffer) -> None:
        """End a lease without keeping the memory: it may hold NaN, or still be written to.

        It is freed when the last reference is gone. Raises ``KeyError`` like :meth:`release`.
        """
        self._leased_bytes -= self._leased.pop(id(buffer))

    def replace(self, buffer: KvBuffer) -> KvBuffer:
        """Another lease of that size for one that ends as by :meth:`discard`.

        Raises ``KeyError`` like it, and ``MemoryError``, with nothing changed, where the device has
        no memory for another.
        """
        self.discard(buffer)
        try:
            return self.lease(buffer.capacity)
        except MemoryError:
            self._leased[id(buffer)] = buffer.nbytes
            self._leased_bytes += buffer.nbytes
            raise

    def _rounded(self, tokens: int) -> int:
        return -(-max(tokens, 1) // self._granule_tokens) * self._granule_tokens

    def _shed(self) -> None:
        """Free the oldest spares until everything fits the budget."""
        while self._spares and self._leased_bytes + self.spare_bytes > self._budget_bytes:
            self._spares.popleft()

    def _take(self, capacity: int) -> torch.Tensor:
        """The smallest spare that fits without waste or overdraft, else fresh zeroed memory."""
        free = (self._budget_bytes - self._leased_bytes) // self._layout.bytes_per_token
        largest = min(2 * capacity, free)
        fitting = [spare for spare in self._spares if capacity <= spare.shape[3] <= largest]
        if not fitting:
            return self._fresh(capacity)
        best = min(fitting, key=lambda spare: spare.shape[3])
        self._spares = deque(spare for spare in self._spares if spare is not best)
        return best

    def _fresh(self, capacity: int) -> torch.Tensor:
        """Zeroed memory, for which spares are given up where there is no other."""
        try:
            return self._allocate(capacity)
        except MemoryError:
            if not self._spares:
                raise
        self._spares.clear()
        return self._allocate(capacity)

    def _allocate(self, capacity: int) -> torch.Tensor:
        try:
            return _zeros(self._layout, capacity, self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(f"no memory for {capacity} tokens of KV") from error


def _zeros(layout: KvLayout, capacity: int, device: torch.device) -> torch.Tensor:
    shape, dtype = layout.shape(capacity), layout.torch_dtype
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zeroed pages from the system as they are touched; torch would write them all now,
    # some 10 ms for a prompt of 500 tokens.
    raw = np.zeros(shape, dtype=np.uint16 if layout.itemsize == 2 else np.uint32)
    return torch.from_numpy(raw).view(dtype)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
