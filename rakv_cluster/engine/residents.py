"""Prefixes that live in the buffers of requests in progress.

Concurrent requests for one cold prefix compute it once: the first computes, later ones wait for
it (bounded) and copy its slots at memory speed. A request in progress is also the nearest cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.reuse.planner import common_prefix


@dataclass(frozen=True, slots=True)
class Donor:
    """``tokens`` leading tokens that ``sequence`` has or will soon have in its buffer."""

    sequence: Sequence
    tokens: int


class Residents:
    """Which active sequence holds, or is about to hold, the KV under a prefix key."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """``sequence`` will hold its prompt's chunks; the first holder of a key stays."""
        for chunk in sequence.request.prompt.chunks:
            self._holders.setdefault(chunk.prefix_key, sequence)

    def remove(self, sequence: Sequence) -> None:
        """``sequence`` gives its buffer up."""
        for chunk in sequence.request.prompt.chunks:
            if self._holders.get(chunk.prefix_key) is sequence:
                del self._holders[chunk.prefix_key]

    def find(self, sequence: Sequence) -> Donor | None:
        """The holder of ``sequence``'s longest held prefix, or None.

        Equal keys are confirmed by equal tokens. The share goes on behind the last common chunk
        while tokens stay equal, but never covers the last known token, whose logits are needed.
        """
        for chunk in reversed(sequence.request.prompt.chunks):
            holder = self._holders.get(chunk.prefix_key)
            if holder is None or holder is sequence:
                continue
            known = holder.ids[: holder.count]
            shared = min(common_prefix(known, sequence.ids[: sequence.count]), sequence.count - 1)
            return Donor(holder, shared)
        return None
