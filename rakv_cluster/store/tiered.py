"""RAM in front of disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rakv_cluster.store.base import (
    ChunkRecord,
    ChunkStore,
    Found,
    Loaded,
    LoadItem,
    StoreStats,
)
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.memory import frozen_copy
from rakv_cluster.store.worker_thread import WorkerThread

_QUEUE_LIMIT = 1024
_COUNTERS = ("dropped_writes", "background_writes", "failed_writes", "promotions")


class TieredStore:
    """Finds in RAM first, promotes what disk loads, writes to disk in the background.

    A put is in RAM when it returns and on disk later; KV of at most ``queue_bytes`` waits for the
    disk, more is dropped from that tier and counted, and so is what the disk raises on. ``stats``
    describes the disk tier's sizes and both tiers' counters.
    """

    def __init__(
        self, memory: ChunkStore, disk: ChunkStore, *, queue_bytes: int = 256 << 20
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._counters = Counters(_COUNTERS)
        self._queue_bytes = queue_bytes
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()
        self._writer = WorkerThread("tiered-writer", queue_limit=_QUEUE_LIMIT)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        found = self._memory.find(keys)
        missing = [key for key in keys if key not in found]
        return {**found, **self._disk.find(missing)} if missing else found

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        outcomes = self._memory.load(items)
        missed = [index for index, loaded in enumerate(outcomes) if not loaded.ok]
        if not missed:
            return outcomes
        from_disk = self._disk.load([items[index] for index in missed])
        for index, loaded in zip(missed, from_disk, strict=True):
            outcomes[index] = loaded
        self._promote([items[index] for index in missed if outcomes[index].ok])
        return outcomes

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        known = self._memory.donors(contents)
        missing = [content for content in contents if content not in known]
        return {**known, **self._disk.donors(missing)} if missing else known

    def put(self, records: Sequence[ChunkRecord]) -> int:
        # The caller may reuse the buffers that the KV are views of; one copy serves both tiers.
        kept = [frozen_copy(record) for record in records]
        taken = self._memory.put(kept)
        size = sum(record.kv.nbytes for record in kept)
        if not self._reserve(size):
            self._counters.add("dropped_writes", len(kept))
        elif not self._writer.post(lambda: self._write(kept, size)):
            self._reserve(-size)
            self._counters.add("dropped_writes", len(kept))
        return taken

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove from both tiers; returns how many keys were in either.

        Waits its turn behind writes that are queued for the disk: one of them could bring back what
        was deleted.
        """
        return self._writer.run(lambda: self._delete(keys))

    def flush(self, timeout_s: float) -> bool:
        """Wait until every put is on disk or dropped; False if that took longer."""
        return self._writer.drain(timeout_s)

    def stats(self) -> StoreStats:
        memory, disk = self._memory.stats(), self._disk.stats()
        counters = {**memory.counters, **disk.counters, **self._counters.snapshot()}
        return StoreStats(disk.records, disk.stored_bytes, disk.budget_bytes, counters)

    def close(self) -> None:
        self._writer.close()
        self._memory.close()
        self._disk.close()

    def _reserve(self, size: int) -> bool:
        """Account for ``size`` bytes waiting for the disk (negative: no longer)."""
        with self._waiting_lock:
            if self._waiting_bytes + size > self._queue_bytes:
                return False
            self._waiting_bytes += size
            return True

    def _delete(self, keys: Sequence[bytes]) -> int:
        in_memory = set(self._memory.find(keys))
        self._memory.delete(keys)
        self._disk.delete([key for key in keys if key in in_memory])
        return len(in_memory) + self._disk.delete([key for key in keys if key not in in_memory])

    def _write(self, records: Sequence[ChunkRecord], size: int) -> None:
        try:
            self._counters.add("background_writes", self._disk.put(records))
        except Exception:
            self._counters.add("failed_writes", len(records))
            raise  # to the worker's log
        finally:
            self._reserve(-size)

    def _promote(self, items: Sequence[LoadItem]) -> None:
        found = self._disk.find([item.key for item in items])
        whole = [
            _record(item, found[item.key])
            for item in items
            if item.key in found
            and found[item.key].lossless
            and found[item.key].token_ids == tuple(item.token_ids)
            # Another class's may have taken its place since it was loaded.
            and item.numeric_class in ("", found[item.key].numeric_class)
        ]
        self._counters.add("promotions", self._memory.put(whole))


def _record(item: LoadItem, found: Found) -> ChunkRecord:
    return ChunkRecord(
        item.key, found.namespace, found.token_ids, found.start, item.layout, item.out,
        found.cost_ms, found.numeric_class, found.created_s,
    )  # fmt: skip
