"""The one writer of a shard: it owns the folder, and every write transaction runs on its thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lmdb

from rakv_cluster.clock import Clock
from rakv_cluster.errors import CorruptRecord, StoreUnavailable
from rakv_cluster.kv.codec import EncodedRecord
from rakv_cluster.store.base import StoreStats
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.eviction import EvictionPolicy, Lru
from rakv_cluster.store.folder import ShardFolder
from rakv_cluster.store.generation import Generation
from rakv_cluster.store.shard_core import CORE_COUNTERS, CommitResult, ShardCore
from rakv_cluster.store.worker_thread import WorkerThread

T = TypeVar("T")

_log = logging.getLogger(__name__)

_COUNTERS = (*CORE_COUNTERS, "disk_errors", "quarantines", "stale_readers")
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)
_MAP_SLACK_BYTES = 16 << 20
_QUEUE_LIMIT = 256


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Limits of one shard.

    A crash of the machine loses at most what was written in the last ``sync_interval_s``; a crash
    of the process loses nothing that was committed.
    """

    budget_bytes: int
    sync_interval_s: float = 5.0
    reader_check_interval_s: float = 30.0

    @property
    def map_bytes(self) -> int:
        """Size of the memory map.

        A third more than the budget: pages freed by an eviction become usable only two
        transactions later, or when the last reader that sees them ends.
        """
        return self.budget_bytes * 4 // 3 + _MAP_SLACK_BYTES


class ShardWriter:
    """Owns a shard folder. Methods may be called from any thread; writes run on one.

    Raises ``WriterFenced`` if another process writes to the folder, ``StoreUnavailable`` if the
    folder cannot be used. A damaged environment is no error: it is moved aside, counted and
    replaced by an empty one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: ShardSettings,
        clock: Clock,
        policy: Callable[[], EvictionPolicy] = Lru,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._policy = policy
        self._counters = Counters(_COUNTERS)
        self._folder = ShardFolder(path)
        self.shard_id = self._folder.create()
        self._lock = self._folder.lock()
        self._touched: dict[bytes, None] = {}
        self._touch_lock = threading.Lock()
        self._dirty = False
        self._synced_at_s = self._checked_at_s = clock.monotonic_s()
        self._thread = WorkerThread(
            f"shard-writer-{self.shard_id[:8]}", queue_limit=_QUEUE_LIMIT, on_idle=self._maintain
        )
        try:
            self._core = self._thread.run(self._open)
        except BaseException:
            self._thread.close()
            self._lock.release()
            raise

    @property
    def generation(self) -> Generation:
        """The live environment, for readers in this process."""
        return self._core.generation

    def commit(self, batch: Sequence[EncodedRecord]) -> CommitResult:
        """Store a batch in one transaction, evicting first.

        A full or failing disk refuses the batch; raises ``StoreUnavailable`` after ``close``.
        """
        return self._thread.run(lambda: self._commit(batch))

    def delete(self, keys: Iterable[bytes]) -> int:
        """Remove records; returns how many were there."""
        wanted = list(keys)
        return self._thread.run(lambda: self._guard(lambda: self._core.delete(wanted), 0))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove damaged records in the background."""
        damaged = list(keys)
        self._thread.post(lambda: self._discard(damaged))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count uses; they are written with the next batch, so that reads never write."""
        with self._touch_lock:
            self._touched.update(dict.fromkeys(keys))

    def keys(self) -> list[bytes]:
        """Everything stored now."""
        return self._thread.run(lambda: list(self._core.catalog))

    def sync(self) -> None:
        """Write counted uses and make everything committed safe from a power failure."""
        self._thread.run(self._sync)

    def stats(self) -> StoreStats:
        """Counters and sizes."""
        return self._thread.run(self._stats)

    def close(self) -> None:
        """Write what is pending, sync, release the folder. Idempotent."""
        try:
            self._thread.run(self._close)
        except StoreUnavailable:
            return
        self._thread.close()
        self._lock.release()

    # Everything below runs on the writer thread.

    def _open(self) -> ShardCore:
        current = self._folder.current()
        if current is not None and current.exists():
            try:
                core = self._adopt(Generation.open_writable(current))
            except CorruptRecord as error:
                self._quarantine(current, error)
            else:
                self._folder.remove_stale(current)
                return core
        return self._start_empty()

    def _adopt(self, generation: Generation) -> ShardCore:
        """Read a generation's index and shrink it to the budget; raises ``CorruptRecord``."""
        catalog = Catalog(self._settings.budget_bytes, self._policy())
        try:
            core = ShardCore(generation, catalog, self._clock, self._counters)
            core.shrink()
        except BaseException:
            generation.retire()
            raise
        return core

    def _start_empty(self) -> ShardCore:
        try:
            fresh = self._folder.next_generation()
            core = self._adopt(Generation.create(fresh, self._settings.map_bytes))
            self._folder.publish(fresh)
        except (OSError, CorruptRecord) as error:
            raise StoreUnavailable(f"cannot start an empty generation: {error}") from error
        return core

    def _quarantine(self, path: Path, error: Exception) -> None:
        self._counters.add("quarantines")
        try:
            aside = self._folder.quarantine(path)
        except OSError as failure:
            raise StoreUnavailable(f"cannot move {path} aside: {failure}") from failure
        _log.error("shard %s: %s; moved to %s, starting empty", self.shard_id, error, aside)

    def _commit(self, batch: Sequence[EncodedRecord]) -> CommitResult:
        self._take_touches()
        result = self._guard(lambda: self._core.commit(batch), CommitResult(refused=len(batch)))
        self._dirty = self._dirty or bool(result.stored)
        self._maintain()
        return result

    def _guard(self, work: Callable[[], T], otherwise: T) -> T:
        """Run a write; a damaged environment is replaced, a failing disk refuses."""
        try:
            return work()
        except _DAMAGE as error:
            damaged = self._core.generation
            self._quarantine(damaged.path, error)
            self._core = self._start_empty()
            damaged.retire()
        except lmdb.Error as error:
            self._counters.add("disk_errors")
            _log.warning("shard %s: write refused: %s", self.shard_id, error)
        return otherwise

    def _discard(self, damaged: list[bytes]) -> None:
        self._guard(lambda: self._core.delete(damaged), 0)

    def _take_touches(self) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._core.touch(touched)

    def _maintain(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._checked_at_s >= self._settings.reader_check_interval_s:
            self._checked_at_s = now_s
            self._counters.add("stale_readers", self._core.generation.env.reader_check())
        if now_s - self._synced_at_s >= self._settings.sync_interval_s:
            self._sync()

    def _sync(self) -> None:
        self._take_touches()
        self._guard(self._core.save_uses, None)
        if self._dirty:
            self._guard(lambda: self._core.generation.env.sync(True), None)
            self._dirty = False
        self._synced_at_s = self._clock.monotonic_s()

    def _stats(self) -> StoreStats:
        catalog = self._core.catalog
        return StoreStats(
            len(catalog), catalog.used_bytes, catalog.budget_bytes, self._counters.snapshot()
        )

    def _close(self) -> None:
        self._dirty = True
        self._sync()
        self._core.generation.retire()
