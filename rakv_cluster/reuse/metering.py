"""How long a request's loads take, for the cost estimates: finished ones and one under way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rakv_cluster.clock import Clock
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import ChunkStore, Found, Loaded, LoadItem, StoreStats
from rakv_cluster.types import Tier


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """One call's bytes from one tier and the time it took."""

    tier: Tier
    stored_bytes: int
    ms: float


class MeteredStore:
    """``inner``, with the time noted of loads of what was found through it.

    One thread uses the store, any may ask for the timings. Of what nobody looked for before it was
    loaded (a few bytes of traits) no rate could be learned, so it is not noted.
    """

    def __init__(self, inner: ChunkStore, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[bytes, Found] = {}
        self._finished: list[LoadTiming] = []
        self._under_way: tuple[Found, ...] = ()
        self._began_s = 0.0

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        found = self._inner.find(keys)
        self._found |= found
        return found

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        looked_for = tuple(self._found[item.key] for item in items if item.key in self._found)
        with self._lock:
            self._began_s = self._clock.monotonic_s()
            self._under_way = looked_for
        outcomes: list[Loaded] = []
        try:
            outcomes = self._inner.load(items)
        finally:
            with self._lock:
                good = [outcome for outcome in outcomes if outcome.ok]
                self._finished += self._shares(good if looked_for else ())
                self._under_way = ()
        return outcomes

    def timings(self) -> tuple[LoadTiming, ...]:
        """Of finished loads, by call and tier."""
        with self._lock:
            return tuple(self._finished)

    def unfinished(self) -> tuple[LoadTiming, ...]:
        """What the load under way has taken so far; empty if none is."""
        with self._lock:
            return self._shares(self._under_way)

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        return self._inner.donors(contents)

    def put(self, records: Sequence[ChunkRecord]) -> int:
        return self._inner.put(records)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._inner.delete(keys)

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _shares(self, loads: Iterable[Found | Loaded]) -> tuple[LoadTiming, ...]:
        """The time since the call began, shared out to tiers by their bytes."""
        sizes: dict[Tier, int] = {}
        for load in loads:
            sizes[load.tier] = sizes.get(load.tier, 0) + load.stored_bytes
        took_ms = (self._clock.monotonic_s() - self._began_s) * 1e3
        total = max(sum(sizes.values()), 1)
        return tuple(
            LoadTiming(tier, size, took_ms * size / total) for tier, size in sizes.items() if size
        )
