"""The one writer of a shard: it owns the folder, and every write transaction runs on its thread."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import lmdb

from rakv_cluster.clock import Clock
from rakv_cluster.errors import ConfigError, CorruptRecord, StoreUnavailable
from rakv_cluster.kv.codec import EncodedRecord
from rakv_cluster.store.base import StoreStats
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.eviction import Arc, PolicyFactory
from rakv_cluster.store.folder import ShardFolder
from rakv_cluster.store.generation import Generation
from rakv_cluster.store.rebuild import Copied, copy_records
from rakv_cluster.store.shard_core import CORE_COUNTERS, DAMAGE, CommitResult, ShardCore
from rakv_cluster.store.worker_thread import WorkerThread

T = TypeVar("T")

_log = logging.getLogger(__name__)

_COUNTERS = (*CORE_COUNTERS, "disk_errors", "quarantines", "stale_readers", "rebuilds")
_MAP_GRAIN_BYTES = 8 << 20
_QUEUE_LIMIT = 256
_OWNER_BYTES = 384  # a tenant and 64 characters have 321, a key of LMDB may have 511
_VERIFY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Limits of one shard.

    ``quota_bytes`` bounds one namespace and ``max_age_s`` the age of a record; 0 means no bound.
    A crash of the machine loses at most what was written in the last ``sync_interval_s``; a crash
    of the process loses nothing that was committed.
    """

    budget_bytes: int
    quota_bytes: int = 0
    max_age_s: float = 0.0
    sync_interval_s: float = 5.0
    check_interval_s: float = 30.0

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise ConfigError("a shard needs a positive budget", field="budget_bytes")
        if self.quota_bytes < 0:
            raise ConfigError("a quota cannot be negative", field="quota_bytes")

    @property
    def map_bytes(self) -> int:
        """Size of the memory map.

        A third more than the budget: pages freed by an eviction become usable only two
        transactions later, or when the last reader that sees them ends.
        """
        return (self.budget_bytes * 4 // 3 // _MAP_GRAIN_BYTES + 2) * _MAP_GRAIN_BYTES

    @classmethod
    def for_map(cls, map_bytes: int) -> ShardSettings:
        """The largest budget whose map has ``map_bytes``.

        A shard opened with it keeps its map and all its records.
        """
        grains = max(map_bytes // _MAP_GRAIN_BYTES - 1, 1)
        return cls((grains * _MAP_GRAIN_BYTES * 3 - 1) // 4)


class ShardWriter:
    """Owns a shard folder. Methods may be called from any thread; writes run on one.

    Raises ``WriterFenced`` if another process writes to the folder, ``StoreUnavailable`` if the
    folder cannot be used. A damaged environment is no error: it is moved aside, counted and
    replaced by an empty one. All methods but ``close`` raise ``StoreUnavailable`` afterwards.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: ShardSettings,
        clock: Clock,
        policy: PolicyFactory = Arc,
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
        self._expired: list[bytes] = []  # since the last commit, which tells of them
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
        """Store a batch in one transaction, evicting first; a full or failing disk refuses it."""
        return self._thread.run(lambda: self._commit(batch))

    def delete(self, keys: Iterable[bytes]) -> int:
        """Remove records; returns how many were there."""
        wanted = list(keys)
        return self._run(lambda: self._core.delete(wanted), 0)

    def clear(self, namespace: bytes) -> int:
        """Remove all records of a namespace; returns how many there were."""
        return self._run(lambda: self._core.clear(namespace), 0)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove damaged records in the background."""
        damaged = list(keys)
        self._thread.post(lambda: self._discard(damaged))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count uses; they are written with the next batch, so that reads never write."""
        with self._touch_lock:
            self._touched.update(dict.fromkeys(keys))

    def pin(self, keys: Iterable[bytes], owner: str, ttl_s: float) -> list[bytes]:
        """Keep records from eviction for ``ttl_s`` seconds; returns the keys that now are pinned.

        Keys that are not stored, and what would bring all pins above half of the budget, are left
        out. Raises ``ValueError`` for an owner of more than 384 bytes.
        """
        if len(owner.encode()) > _OWNER_BYTES:
            raise ValueError(f"a pin's owner may have {_OWNER_BYTES} bytes")
        wanted = list(keys)
        return self._run(lambda: self._core.pin(wanted, owner, ttl_s), [])

    def unpin(self, keys: Iterable[bytes], owner: str) -> int:
        """End an owner's pins; returns how many there were."""
        wanted = list(keys)
        return self._run(lambda: self._core.unpin(wanted, owner), 0)

    def pinned(self) -> frozenset[bytes]:
        """Keys that cannot be evicted now."""
        return self._thread.run(self._pinned)

    def keys(self) -> list[bytes]:
        """Everything stored now."""
        return self._run(lambda: list(self._core.catalog), [])

    def hottest(self, limit: int, limit_bytes: int) -> list[bytes]:
        """At most ``limit`` keys of together at most ``limit_bytes``, those used last first."""
        return self._run(lambda: self._hottest(limit, limit_bytes), [])

    def sync(self) -> None:
        """Write counted uses and make everything committed safe from a power failure."""
        self._thread.run(self._sync)

    def compact(self) -> Copied:
        """Rewrite the shard into a new generation, without its free pages and damaged records.

        Needs as much disk as the records take, and blocks writes meanwhile; readers go on. Raises
        ``StoreUnavailable`` if it fails; nothing has changed then.
        """
        return self._thread.run(self._rebuild)

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

    def _run(self, work: Callable[[], T], otherwise: T) -> T:
        return self._thread.run(lambda: self._guard(work, otherwise))

    # Everything below runs on the writer thread.

    def _open(self) -> ShardCore:
        current = self._folder.current()
        if current is not None and current.exists():
            try:
                self._core = self._adopt_current(current)
            except CorruptRecord as error:
                self._quarantine(current, error)
            else:
                self._folder.remove_stale(current)
                if self._core.generation.map_bytes != self._settings.map_bytes:
                    self._resize()
                return self._core
        self._folder.mark_open()
        return self._start_empty()

    def _adopt_current(self, path: Path) -> ShardCore:
        if self._folder.outlived_its_machine():
            self._verify_apart()
        self._folder.mark_open()
        return self._adopt(Generation.open_writable(path))

    def _verify_apart(self) -> None:
        """Have another process look first: it may die of what it finds. Raises ``CorruptRecord``.

        Single damaged records are no reason to give up the others.
        """
        command = [sys.executable, "-m", "rakv_cluster.store.verify", str(self._folder.path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_VERIFY_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CorruptRecord("verification took too long") from error
        if done.returncode not in (0, 1):
            raise CorruptRecord(f"verification ended with {done.returncode}: {done.stdout.strip()}")

    def _resize(self) -> None:
        """Give a shard whose budget was changed a map of the right size.

        Readers never see a map change under them, and a lowered budget gives its disk space back.
        """
        try:
            self._rebuild()
        except StoreUnavailable as error:
            _log.warning("shard %s keeps its old map: %s", self.shard_id, error)

    def _adopt(self, generation: Generation) -> ShardCore:
        """Read a generation's index and shrink it to the budget; raises ``CorruptRecord``."""
        settings = self._settings
        catalog = Catalog(settings.budget_bytes, self._policy, quota_bytes=settings.quota_bytes)
        try:
            core = ShardCore(generation, catalog, self._clock, self._counters)
            core.shrink()
        except lmdb.Error as error:
            generation.retire()
            raise CorruptRecord(f"{generation.path} cannot be written: {error}") from error
        except BaseException:
            generation.retire()
            raise
        return core

    def _start_empty(self) -> ShardCore:
        try:
            fresh = self._folder.next_generation()
            core = self._adopt(Generation.create(fresh, self._settings.map_bytes))
            self._publish(core)
        except (OSError, CorruptRecord) as error:
            raise StoreUnavailable(f"cannot start an empty generation: {error}") from error
        return core

    def _rebuild(self) -> Copied:
        old = self._core.generation
        fresh = self._next_folder()
        try:
            target = Generation.create(fresh, self._settings.map_bytes)
            try:
                self._core.save_uses()
                copied = copy_records(old, target)
                target.env.sync(True)
            except BaseException:
                target.retire()
                raise
            core = self._adopt(target)
            self._publish(core)
        except (lmdb.Error, OSError, CorruptRecord) as error:
            self._folder.discard(fresh)
            raise StoreUnavailable(f"cannot rebuild {old.path}: {error}") from error
        self._core = core
        old.retire()
        self._counters.add("rebuilds")
        return copied

    def _publish(self, core: ShardCore) -> None:
        try:
            self._folder.publish(core.generation.path)
        except OSError:
            core.generation.retire()
            raise

    def _next_folder(self) -> Path:
        try:
            return self._folder.next_generation()
        except OSError as error:
            raise StoreUnavailable(f"cannot make a generation: {error}") from error

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
        expired, self._expired = self._expired, []
        gone = tuple(key for key in expired if key not in self._core.catalog)
        return replace(result, evicted=result.evicted + gone)

    def _guard(self, work: Callable[[], T], otherwise: T) -> T:
        """Run a write; a damaged environment is replaced, a failing disk refuses."""
        try:
            if not self._core.generation.is_whole():
                raise lmdb.CorruptedError(f"{self._core.generation.path} was truncated")
            return work()
        except DAMAGE as error:
            self._replace_damaged(error)
        except (lmdb.Error, OSError) as error:
            self._counters.add("disk_errors")
            _log.warning("shard %s: write refused: %s", self.shard_id, error)
        return otherwise

    def _replace_damaged(self, error: Exception) -> None:
        """Move a live environment aside; readers that are in it finish, then follow CURRENT."""
        damaged = self._core.generation
        damaged.retire()
        try:
            self._quarantine(damaged.path, error)
            self._core = self._start_empty()
        except StoreUnavailable as failure:
            # The retired environment refuses everything from here on.
            _log.error("shard %s is out of service: %s", self.shard_id, failure)

    def _pinned(self) -> frozenset[bytes]:
        return self._core.pinned()

    def _hottest(self, limit: int, limit_bytes: int) -> list[bytes]:
        self._take_touches()
        return self._core.catalog.hottest(limit, limit_bytes)

    def _discard(self, damaged: list[bytes]) -> None:
        self._guard(lambda: self._core.delete(damaged), 0)

    def _take_touches(self) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._core.touch(touched)

    def _maintain(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._checked_at_s >= self._settings.check_interval_s:
            self._checked_at_s = now_s
            self._guard(self._check, None)
        if now_s - self._synced_at_s >= self._settings.sync_interval_s:
            self._sync()

    def _check(self) -> None:
        self._counters.add("stale_readers", self._core.generation.env.reader_check())
        self._expired += self._core.expire(self._settings.max_age_s)

    def _sync(self) -> None:
        self._take_touches()
        self._guard(self._core.save_uses, None)
        if self._dirty:
            self._dirty = self._guard(self._flush, True)
        self._synced_at_s = self._clock.monotonic_s()

    def _flush(self) -> bool:
        self._core.generation.env.sync(True)
        return False

    def _stats(self) -> StoreStats:
        catalog = self._core.catalog
        return StoreStats(
            len(catalog), catalog.used_bytes, catalog.budget_bytes, self._counters.snapshot()
        )

    def _close(self) -> None:
        self._dirty = True
        self._sync()
        if not self._dirty:
            self._folder.mark_closed()
        self._core.generation.retire()
