"""KV between a model's device and the host's memory.

On the CPU both are the same memory and a transfer is a copy. On a GPU, copies run on a stream of
their own over pinned host memory: a load holds up its loader thread, not the model's stream; a
save holds up neither the engine's thread nor, but for its own length, the model's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rakv_cluster.kv.layout import KvLayout, bits


class HostCopy(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> np.ndarray:
        """The bits of the slots once they have arrived, contiguous, private; any thread. Not to be
        written to."""
        ...


class Transfer(Protocol):
    """Moves slots ``[layers, 2, kv_heads, tokens, head_dim]`` of one device. Any thread."""

    def landing(self, slots: torch.Tensor, layout: KvLayout) -> torch.Tensor:
        """Host memory of the shape of ``slots`` in which to put KV for them: ``slots`` themselves
        where the host can write there."""
        ...

    def to_device(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Bring what was put into each (slots, landing) pair into its slots; returns when the
        model may read them."""
        ...

    def to_host(self, slots: torch.Tensor) -> HostCopy:
        """Copy slots as they are now; returns at once where the device copies by itself."""
        ...


def transfer_for(device: torch.device) -> Transfer:
    """The way to move KV from and to ``device``."""
    return CudaTransfer(device) if device.type == "cuda" else HOST_TRANSFER


@dataclass(frozen=True, slots=True)
class _Copied:
    kv: np.ndarray

    def wait(self) -> np.ndarray:
        return self.kv


class HostTransfer:
    """The model computes in host memory."""

    def landing(self, slots: torch.Tensor, layout: KvLayout) -> torch.Tensor:
        """See :class:`Transfer`."""
        return slots

    def to_device(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See :class:`Transfer`."""

    def to_host(self, slots: torch.Tensor) -> HostCopy:
        """See :class:`Transfer`."""
        # Memory of numpy's own that nobody can write to: a store keeps it as it is.
        copied = np.array(bits(slots), order="C")
        copied.setflags(write=False)
        return _Copied(copied)


HOST_TRANSFER = HostTransfer()


@dataclass(frozen=True, slots=True)
class _Copying:
    host: torch.Tensor
    arrived: torch.cuda.Event

    def wait(self) -> np.ndarray:
        self.arrived.synchronize()
        return bits(self.host)


class CudaTransfer:
    """One copy stream per direction on one GPU.

    Written against PyTorch's stream semantics; not executed on a GPU yet (README).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        self._saves = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    def landing(self, slots: torch.Tensor, layout: KvLayout) -> torch.Tensor:
        """See :class:`Transfer`."""
        return torch.empty(layout.shape(slots.shape[3]), dtype=slots.dtype, pin_memory=True)

    def to_device(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See :class:`Transfer`."""
        # What the model's stream did last to this memory (zeroing a fresh lease) comes first.
        self._loads.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._loads):
            for slots, host in pairs:
                slots.copy_(host, non_blocking=True)
        self._loads.synchronize()

    def to_host(self, slots: torch.Tensor) -> HostCopy:
        """See :class:`Transfer`; called by the thread that runs the model."""
        host = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
        model = torch.cuda.current_stream(self._device)
        self._saves.wait_stream(model)
        with torch.cuda.stream(self._saves):
            host.copy_(slots, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            arrived.record(self._saves)
        # The slots may be leased to another request next: its rows wait for this copy.
        model.wait_event(arrived)
        return _Copying(host, arrived)
