"""Who leaves first. A policy sees metadata only: no clock, no bytes, no I/O.

A policy is told what happens to entries and answers with an order; :class:`~.catalog.Catalog`
decides how many leave, and spares pinned ones. ``benchmarks/eviction.py`` compares them on real
traces; the default is :class:`Arc` (docs/adr/0023).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

_GHOST_FACTOR = 4  # evicted bytes remembered, in budgets
_S3_SMALL_SHARE = 0.1
_S3_MOST_USES = 3


@dataclass(slots=True)
class Entry:
    """What a tier knows about a stored record without its bytes.

    ``size_bytes`` is what it takes of the budget, ``cost_ms`` what recomputing it would take,
    ``start`` its first token's position; times are wall-clock seconds. ``uses`` counts hits.
    ``content`` names what the tokens are wherever they stand (empty: not to be reused elsewhere).
    """

    namespace: bytes
    size_bytes: int
    tokens: int
    start: int
    cost_ms: float
    created_s: float
    last_use_s: float
    uses: int = 0
    content: bytes = b""


class EvictionPolicy(Protocol):
    """Keeps entries in the order in which they should leave. Not thread-safe."""

    def insert(self, key: bytes, entry: Entry) -> None:
        """An entry was stored; ``key`` is new."""
        ...

    def touch(self, key: bytes, entry: Entry) -> None:
        """An entry was used; ``entry`` already counts this use."""
        ...

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        """An entry left, by eviction or for another reason."""
        ...

    def coldest_first(self) -> Generator[bytes, None, None]:
        """Keys in the order in which they should leave.

        Close it before any other call; a key that was passed over stays where it was.
        """
        ...


PolicyFactory: TypeAlias = Callable[[int], EvictionPolicy]
"""Makes a policy for a budget in bytes."""


class _Queue:
    """Keys in order of arrival, with their total size."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def size_of(self, key: bytes) -> int:
        return self._sizes[key]

    def push(self, key: bytes, size: int, *, oldest: bool = False) -> None:
        self._sizes[key] = size
        self.used_bytes += size
        if oldest:
            self._sizes.move_to_end(key, last=False)

    def renew(self, key: bytes) -> None:
        self._sizes.move_to_end(key)

    def pop(self, key: bytes) -> int:
        size = self._sizes.pop(key)
        self.used_bytes -= size
        return size

    def pop_oldest(self) -> tuple[bytes, int]:
        key, size = self._sizes.popitem(last=False)
        self.used_bytes -= size
        return key, size


class Lru:
    """Least recently used first."""

    def __init__(self, budget_bytes: int) -> None:
        self._order = _Queue()

    def insert(self, key: bytes, entry: Entry) -> None:
        self._order.push(key, entry.size_bytes)

    def touch(self, key: bytes, entry: Entry) -> None:
        self._order.renew(key)

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        self._order.pop(key)

    def coldest_first(self) -> Generator[bytes, None, None]:
        yield from self._order


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST 2003), in bytes.

    Entries used once and entries used again are two LRU lists; which one gives way depends on a
    target that moves whenever a key comes back that was evicted too early from one of them. Two
    things differ from the paper: evicted keys are remembered for several budgets, because a
    conversation pauses for longer than a small cache lasts; and the list that gives way is the one
    above its share at each step of an eviction, since one prompt evicts many.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._once, self._again = _Queue(), _Queue()
        self._once_gone, self._again_gone = _Queue(), _Queue()
        self._once_target = budget_bytes / 2

    def insert(self, key: bytes, entry: Entry) -> None:
        size = entry.size_bytes
        if key in self._once_gone:
            self._once_gone.pop(key)
            ratio = self._again_gone.used_bytes / (self._once_gone.used_bytes + size)
            grown = self._once_target + size * max(1.0, ratio)
            self._once_target = min(float(self._budget_bytes), grown)
            self._again.push(key, size)
        elif key in self._again_gone:
            self._again_gone.pop(key)
            ratio = self._once_gone.used_bytes / (self._again_gone.used_bytes + size)
            self._once_target = max(0.0, self._once_target - size * max(1.0, ratio))
            self._again.push(key, size)
        else:
            # Entries that were used before a restart keep their place.
            (self._again if entry.uses else self._once).push(key, size)

    def touch(self, key: bytes, entry: Entry) -> None:
        if key in self._once:
            self._again.push(key, self._once.pop(key))
        else:
            self._again.renew(key)

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        held, gone = (
            (self._once, self._once_gone) if key in self._once else (self._again, self._again_gone)
        )
        size = held.pop(key)
        if not evicted:
            return
        gone.push(key, size)
        while self._remembered_bytes > _GHOST_FACTOR * self._budget_bytes:
            longer = max(self._once_gone, self._again_gone, key=lambda queue: queue.used_bytes)
            longer.pop_oldest()

    def coldest_first(self) -> Generator[bytes, None, None]:
        once, again = iter(self._once), iter(self._again)
        once_bytes, once_left, again_left = self._once.used_bytes, len(self._once), len(self._again)
        while once_left or again_left:
            if once_left and (once_bytes > self._once_target or not again_left):
                key = next(once)
                once_left -= 1
                once_bytes -= self._once.size_of(key)
            else:
                key = next(again)
                again_left -= 1
            yield key

    @property
    def _remembered_bytes(self) -> int:
        return self._once_gone.used_bytes + self._again_gone.used_bytes


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023), in bytes.

    New entries pass through a small queue; those used there, or evicted and soon wanted again, get
    into the main queue, where each use buys one more round.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._small_bytes = int(budget_bytes * _S3_SMALL_SHARE)
        self._ghost_bytes = budget_bytes - self._small_bytes
        self._small, self._main, self._gone = _Queue(), _Queue(), _Queue()
        self._uses: dict[bytes, int] = {}

    def insert(self, key: bytes, entry: Entry) -> None:
        self._uses[key] = 0
        if key in self._gone:
            self._gone.pop(key)
            self._main.push(key, entry.size_bytes)
        else:
            (self._main if entry.uses else self._small).push(key, entry.size_bytes)

    def touch(self, key: bytes, entry: Entry) -> None:
        self._uses[key] = min(_S3_MOST_USES, self._uses[key] + 1)

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        del self._uses[key]
        if key in self._main:
            self._main.pop(key)
            return
        size = self._small.pop(key)
        if evicted:
            self._gone.push(key, size)
            while self._gone.used_bytes > self._ghost_bytes:
                self._gone.pop_oldest()

    def coldest_first(self) -> Generator[bytes, None, None]:
        passed: list[tuple[_Queue, bytes, int]] = []
        try:
            while len(self._small) or len(self._main):
                from_small = len(self._small) > 0 and (
                    self._small.used_bytes > self._small_bytes or not len(self._main)
                )
                queue = self._small if from_small else self._main
                key, size = queue.pop_oldest()
                if self._uses[key] == 0:
                    passed.append((queue, key, size))
                    yield key
                else:
                    self._uses[key] = 0 if from_small else self._uses[key] - 1
                    self._main.push(key, size)
        finally:
            for queue, key, size in reversed(passed):
                queue.push(key, size, oldest=True)


class Gdsf:
    """Greedy-dual size frequency (Cherkasova, 1998) with recompute cost per byte.

    Rank = age + uses x ms saved per byte; the age is the rank of the last one evicted.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._age = 0.0
        self._ranks: dict[bytes, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._changes = 0

    def insert(self, key: bytes, entry: Entry) -> None:
        self._changes += 1
        rank = self._age + (entry.uses + 1) * entry.cost_ms / max(1, entry.size_bytes)
        self._ranks[key] = (rank, self._changes)
        heapq.heappush(self._heap, (rank, self._changes, key))

    touch = insert

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        rank, _ = self._ranks.pop(key)
        if evicted:
            self._age = max(self._age, rank)

    def coldest_first(self) -> Generator[bytes, None, None]:
        passed: list[tuple[float, int, bytes]] = []
        try:
            while self._heap:
                rank, change, key = heapq.heappop(self._heap)
                if self._ranks.get(key) == (rank, change):
                    passed.append((rank, change, key))
                    yield key
        finally:
            for item in passed:
                heapq.heappush(self._heap, item)


POLICIES: dict[str, PolicyFactory] = {"arc": Arc, "lru": Lru, "s3fifo": S3Fifo, "gdsf": Gdsf}
"""Policies by the name they have in settings."""
