"""Which node owns a key: rendezvous hashing over the live nodes.

Every process computes the same owner from the same set of nodes, without a table to agree on. When
a node comes or goes only the keys it wins or loses change owner (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

NODE_LIMIT = 4096
"""Most nodes of one placement: every key is mixed with every node."""

_MIXES = 1 << 16  # at once, so that temporary arrays stay in the processor's cache


class Placement:
    """Owners of keys over a fixed set of nodes. Immutable.

    Keys are sha256 digests, hence already uniform: their first 8 bytes are the key's hash. A node
    wins a key with the largest mix of both hashes; equal mixes go to the node first by name.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes: tuple[str, ...] = tuple(sorted(set(nodes)))
        if len(self.nodes) > NODE_LIMIT:
            raise ValueError(f"{len(self.nodes)} nodes exceed the limit of {NODE_LIMIT}")
        seeds = [xxhash.xxh3_64_intdigest(node.encode()) for node in self.nodes]
        self._seeds = np.asarray(seeds, dtype=np.uint64)[:, None]

    def owner(self, key: bytes) -> str:
        """The node that owns ``key``; raises ``LookupError`` where there is no node."""
        return self.owners((key,))[0]

    def owners(self, keys: Sequence[bytes]) -> list[str]:
        """The owner of each key, in order; raises ``LookupError`` where there is no node."""
        if not self.nodes:
            raise LookupError("no live node to place keys on")
        hashes = np.frombuffer(b"".join(key[:8] for key in keys), dtype="<u8")
        size = max(_MIXES // len(self.nodes), 1)
        # The first of equal mixes wins in argmax, and nodes are sorted by name.
        winners = [
            _mix(hashes[start : start + size] ^ self._seeds).argmax(axis=0)
            for start in range(0, len(hashes), size)
        ]
        return [self.nodes[index] for part in winners for index in part.tolist()]

    def group(self, keys: Sequence[bytes]) -> dict[str, list[bytes]]:
        """``keys`` by owner, in order within each; empty where there is no node."""
        groups: dict[str, list[bytes]] = {}
        if self.nodes:
            for key, owner in zip(keys, self.owners(keys), strict=True):
                groups.setdefault(owner, []).append(key)
        return groups


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea and Flood, 2014), elementwise; wraps around."""
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(30))
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
