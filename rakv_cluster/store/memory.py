"""The hot tier: raw KV bits in this process, within a byte budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rakv_cluster.clock import Clock
from rakv_cluster.store.base import ChunkRecord, Found, Loaded, LoadItem, StoreStats, serves
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.donors import Donor, best_donor, donated_content
from rakv_cluster.store.eviction import Arc, Entry, PolicyFactory
from rakv_cluster.store.heap import FreedBytes, trim_heap
from rakv_cluster.types import Tier

_COUNTERS = ("ram_hits", "ram_misses", "ram_evictions", "ram_refused", "ram_puts")


class MemoryStore:
    """Keeps a copy of each record's KV, read-only, so that loads need no lock while copying."""

    def __init__(
        self,
        budget_bytes: int,
        clock: Clock,
        policy: PolicyFactory = Arc,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._freed = FreedBytes(trim)
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, ChunkRecord] = {}
        self._donors: dict[bytes, dict[bytes, Donor]] = {}
        self._catalog = Catalog(budget_bytes, policy)
        self._counters = Counters(_COUNTERS)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        with self._lock:
            held = {key: self._held[key] for key in keys if key in self._held}
        return {key: _found(record) for key, record in held.items()}

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        with self._lock:
            held = [self._held.get(item.key) for item in items]
        outcomes = [_load(record, item) for record, item in zip(held, items, strict=True)]
        hits = [item.key for item, loaded in zip(items, outcomes, strict=True) if loaded.ok]
        with self._lock:
            self._catalog.touch(hits, self._clock.wall_s())
        self._counters.add("ram_hits", len(hits))
        self._counters.add("ram_misses", len(items) - len(hits))
        return outcomes

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        with self._lock:
            known = {content: self._donors.get(content) for content in contents}
            return {c: best_donor(each.values()).key for c, each in known.items() if each}

    def put(self, records: Sequence[ChunkRecord]) -> int:
        # A prompt's last chunk first: it is worth nothing without the others and leaves first.
        count = sum(self._put(record) for record in sorted(records, key=lambda r: -r.start))
        self._freed.give_back()
        return count

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            count = sum(self._drop(key) for key in keys)
        self._freed.give_back()
        return count

    def stats(self) -> StoreStats:
        with self._lock:
            records, used = len(self._catalog), self._catalog.used_bytes
        return StoreStats(records, used, self._catalog.budget_bytes, self._counters.snapshot())

    def newest(self, count: int) -> list[bytes]:
        """The ``count`` keys used last, newest first."""
        with self._lock:
            return self._catalog.newest(count)

    def close(self) -> None:
        with self._lock:
            for key in tuple(self._held):
                self._drop(key)

    def _put(self, record: ChunkRecord) -> bool:
        size_bytes = record.kv.nbytes
        with self._lock:
            held = self._held.get(record.key)
            if held is not None and serves(held, record):
                return True
        if size_bytes > self._catalog.budget_bytes:
            self._counters.add("ram_refused")
            return False
        kept = frozen_copy(record)
        with self._lock:
            # A tail that grew is still the record that was used.
            entry = _entry(record, size_bytes, self._clock.wall_s())
            if record.key in self._catalog:
                entry.uses = self._catalog[record.key].uses
            self._drop(record.key)
            victims = self._catalog.victims({record.namespace: size_bytes})
            for key in victims:
                self._take(key)
                self._catalog.remove(key, evicted=True)
            self._held[record.key] = kept
            if content := donated_content(kept):
                donors = self._donors.setdefault(content, {})
                donors[kept.key] = Donor(kept.key, kept.start)
            self._catalog.add(record.key, entry)
        self._counters.add("ram_puts")
        self._counters.add("ram_evictions", len(victims))
        return True

    def _drop(self, key: bytes) -> bool:
        """Remove a record if it is there; the lock is held."""
        if key not in self._held:
            return False
        self._take(key)
        self._catalog.remove(key)
        return True

    def _take(self, key: bytes) -> None:
        """Let go of a held record's KV; the lock is held."""
        record = self._held.pop(key)
        self._freed.add(record.kv.nbytes)
        if content := donated_content(record):
            donors = self._donors[content]
            del donors[key]
            if not donors:
                del self._donors[content]


def _load(held: ChunkRecord | None, item: LoadItem) -> Loaded:
    tokens = len(item.token_ids)
    if held is None or not item.accepts(held):
        return Loaded(ok=False, tier=Tier.RAM)
    np.copyto(item.out, held.kv[:, :, :, :tokens])
    return Loaded(ok=True, tier=Tier.RAM, stored_bytes=held.kv.nbytes)


def frozen_copy(record: ChunkRecord) -> ChunkRecord:
    """The record with KV that nobody can change: itself if that is so already."""
    if record.kv.base is None and not record.kv.flags.writeable:
        return record
    kv = np.array(record.kv, order="C")
    kv.setflags(write=False)
    return replace(record, kv=kv)


def _found(record: ChunkRecord) -> Found:
    return Found(
        record.token_ids, Tier.RAM, record.kv.nbytes, record.cost_ms, record.numeric_class,
        record.namespace, record.start, record.created_s,
    )  # fmt: skip


def _entry(record: ChunkRecord, size_bytes: int, now_s: float) -> Entry:
    return Entry(
        record.namespace, size_bytes, len(record.token_ids), record.start, record.cost_ms,
        record.created_s, now_s, content=donated_content(record),
    )  # fmt: skip
