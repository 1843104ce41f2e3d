"""Who leaves first. A policy sees metadata only: no clock, no bytes, no I/O.

A policy is told what happens to entries and answers with an order; :class:`~.catalog.Catalog`
decides how many leave, and spares pinned ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Entry:
    """What a tier knows about a stored record without its bytes.

    ``size_bytes`` is what it takes of the budget, ``cost_ms`` what recomputing it would take,
    ``start`` its first token's position; times are wall-clock seconds. ``uses`` counts hits.
    """

    namespace: bytes
    size_bytes: int
    tokens: int
    start: int
    cost_ms: float
    created_s: float
    last_use_s: float
    uses: int = 0


class EvictionPolicy(Protocol):
    """Keeps entries in order of how soon they should leave. Not thread-safe."""

    def insert(self, key: bytes, entry: Entry) -> None:
        """An entry was stored; ``key`` is new."""
        ...

    def touch(self, key: bytes, entry: Entry) -> None:
        """An entry was used; ``entry`` already counts this use."""
        ...

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        """An entry left, by eviction or for another reason."""
        ...

    def coldest_first(self) -> Iterator[bytes]:
        """Keys in the order in which they should leave; not valid after any change."""
        ...


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes, entry: Entry) -> None:
        self._order[key] = None

    def touch(self, key: bytes, entry: Entry) -> None:
        self._order.move_to_end(key)

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        del self._order[key]

    def coldest_first(self) -> Iterator[bytes]:
        return iter(self._order)
