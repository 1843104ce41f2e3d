"""The nodes' disks and the directory over them, in virtual time, for :mod:`.simulated_cluster`."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from rakv_cluster.cluster.directory import Announcer, DirectoryPartition, DirectorySnapshot
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.eviction import Entry

_NAMESPACE = b"simulated"
_CHANGES = 1 << 20


class KvTier:
    """Keys of one tier within a budget of tokens, evicted by the store's policy."""

    def __init__(self, budget_tokens: int) -> None:
        self._catalog = Catalog(budget_tokens)
        self._recent: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._catalog

    def touch(self, keys: Sequence[bytes], now_ms: float) -> None:
        """Count a use of those that are here."""
        self._catalog.touch(keys, now_ms / 1e3)
        for key in keys:
            if key in self._recent:
                self._recent.move_to_end(key)

    def add(
        self, chunks: Mapping[bytes, tuple[int, int]], now_ms: float
    ) -> tuple[list[bytes], list[bytes]]:
        """Keep chunks, ``{key: (start, tokens)}``; returns the keys that came and that went.

        What does not fit is left out, last chunks first.
        """
        fresh: dict[bytes, tuple[int, int]] = {}
        tokens = 0
        for key, extent in chunks.items():
            if key not in self._catalog and tokens + extent[1] <= self._catalog.budget_bytes:
                fresh[key] = extent
                tokens += extent[1]
        if not fresh:
            return [], []
        victims = self._catalog.victims({_NAMESPACE: tokens})
        for key in victims:
            self._catalog.remove(key, evicted=True)
            del self._recent[key]
        now_s = now_ms / 1e3
        for key, (start, size) in reversed(fresh.items()):  # the first chunk leaves last
            self._recent[key] = None
            self._catalog.add(key, Entry(_NAMESPACE, size, size, start, 0.0, now_s, now_s))
        return list(fresh), victims

    def newest(self, count: int) -> list[bytes]:
        """The keys used last, newest first."""
        return list(itertools.islice(reversed(self._recent), count))


class SimulatedNode:
    """A node's disk; ``changed`` hears which keys came and went."""

    def __init__(
        self,
        name: str,
        disk_tokens: int,
        changed: Callable[[Sequence[bytes], Sequence[bytes]], None],
    ) -> None:
        self.name = name
        self.disk = KvTier(disk_tokens)
        self.slowdown = 1.0
        self._changed = changed

    def keep(self, chunks: Mapping[bytes, tuple[int, int]], now_ms: float) -> None:
        """Write those chunks that are not there yet."""
        added, removed = self.disk.add(chunks, now_ms)
        self._changed(added, removed)


class SimulatedStore:
    """Nodes, one per budget of disk tokens, each with its partition of the directory."""

    def __init__(self, disk_tokens: Sequence[int]) -> None:
        names = [f"n{number}" for number in range(len(disk_tokens))]
        self._copies: Counter[bytes] = Counter()
        self._held: dict[str, set[bytes]] = {name: set() for name in names}
        self._partitions = {name: DirectoryPartition(name) for name in names}
        self._announcers = {name: Announcer(name, f"{name}/1") for name in names}
        self.nodes = [
            SimulatedNode(name, tokens, self._recorder(name))
            for name, tokens in zip(names, disk_tokens, strict=True)
        ]
        self.live: tuple[str, ...] = tuple(names)
        self._set_live()

    def elsewhere(self, node: str, key: bytes) -> bool:
        """Whether the disk of a node other than ``node`` holds ``key``."""
        return self._copies[key] - (key in self._held[node]) > 0

    def slow_down(self, node: int, factor: float) -> None:
        """From now on that node's disk takes ``factor`` times as long."""
        self.nodes[node].slowdown = factor

    def remove(self, node: str) -> None:
        """A node is gone with its disk and its partition."""
        self._copies.subtract(self._held.pop(node))
        self._held[node] = set()
        self.live = tuple(name for name in self.live if name != node)
        del self._partitions[node], self._announcers[node]
        self._set_live()

    def exchange(self) -> None:
        """Announce everything that is new to the partitions."""
        for announcer in self._announcers.values():
            messages = announcer.messages()
            while messages:
                for node, message in messages.items():
                    accepted = self._partitions[node].announce(message)
                    announcer.answered(node, message, accepted=accepted)
                messages = announcer.messages()

    def update(self, snapshot: DirectorySnapshot) -> None:
        """Bring a reader's snapshot up to what has been announced."""
        for node, position in snapshot.positions().items():
            if node in self._partitions:
                snapshot.apply(node, self._partitions[node].changes(position, _CHANGES))

    def _set_live(self) -> None:
        for partition in self._partitions.values():
            partition.set_live(self.live)
        for announcer in self._announcers.values():
            announcer.set_nodes(self.live)

    def _recorder(self, node: str) -> Callable[[Sequence[bytes], Sequence[bytes]], None]:
        def record(added: Sequence[bytes], removed: Sequence[bytes]) -> None:
            self._held[node].update(added)
            self._held[node].difference_update(removed)
            self._copies.update(added)
            self._copies.subtract(removed)
            if node in self._announcers and (added or removed):
                self._announcers[node].record(added, removed)

        return record
