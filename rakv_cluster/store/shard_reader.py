"""Reading a shard: from another process on the same node, or beside its writer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lmdb
import numpy as np

from rakv_cluster.errors import CorruptRecord, StoreUnavailable
from rakv_cluster.kv.codec import EncodedRecord, decode
from rakv_cluster.store.base import Found, Loaded, LoadItem
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.donors import best_donor
from rakv_cluster.store.folder import DATA_FILE, ShardFolder
from rakv_cluster.store.generation import (
    Generation,
    StoredHead,
    get_encoded,
    get_head,
    read_body,
    read_donors,
)
from rakv_cluster.types import Tier

T = TypeVar("T")

READER_COUNTERS = ("disk_hits", "disk_misses", "disk_corrupt", "disk_read_errors")
_MISS = Loaded(ok=False, tier=Tier.DISK)
_MAX_CONCURRENT_READS = 16
_MAX_REPORTED_KEYS = 10_000
_KEPT_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What readers saw since the last report: keys in use, keys whose record is damaged."""

    touched: tuple[bytes, ...]
    damaged: tuple[bytes, ...]


class GenerationSource(Protocol):
    """Where a reader gets the live environment from."""

    def lease(self) -> AbstractContextManager[Generation]:
        """The live environment, kept open inside the block.

        Raises ``StoreUnavailable``.
        """
        ...

    def close(self) -> None:
        """Release what the source itself opened."""
        ...


class FollowedFolder:
    """Opens a shard folder read-only and follows its CURRENT file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = ShardFolder(path)
        self._lock = threading.Lock()
        self._open: Generation | None = None
        self._file = (0, 0)  # device and inode of what is open

    @contextmanager
    def lease(self) -> Iterator[Generation]:
        generation = self._live()
        with generation.lease():
            yield generation

    def close(self) -> None:
        with self._lock:
            self._retire()

    def _live(self) -> Generation:
        current = self._folder.current()
        if current is None:
            raise StoreUnavailable(f"{self._folder.path} holds no shard yet")
        with self._lock:
            # The file and not its name: what takes the place of a damaged one may be named like it.
            file = _identity(current / DATA_FILE)
            if self._open is None or self._file != file:
                self._retire()
                try:
                    self._open = Generation.open_readonly(current)
                except CorruptRecord as error:
                    # The writer moves it aside when it opens the shard; until then it is a miss.
                    raise StoreUnavailable(error.message) from error
                self._file = file
            return self._open

    def _retire(self) -> None:
        if self._open is not None:
            self._open.retire()
            self._open = None


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be read: {error}") from error
    return status.st_dev, status.st_ino


class ShardReader:
    """Finds and loads records. Methods may be called from any thread and never raise for faults.

    In a process that also writes the shard use :class:`~.lmdb_shard.LmdbStore`: LMDB allows one
    open environment per process and folder.
    """

    def __init__(self, source: str | os.PathLike[str] | GenerationSource) -> None:
        self._source: GenerationSource = (
            FollowedFolder(source) if isinstance(source, (str, os.PathLike)) else source
        )
        self._counters = Counters(READER_COUNTERS)
        # Each concurrent read takes a slot of LMDB's reader table and a scratch buffer.
        self._slots = threading.BoundedSemaphore(_MAX_CONCURRENT_READS)
        self._scratch = _Scratch()
        self._report_lock = threading.Lock()
        self._touched: dict[bytes, None] = {}
        self._damaged: dict[bytes, None] = {}

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Those of ``keys`` that are stored and whose head is intact."""

        def collect(generation: Generation, txn: Any) -> dict[bytes, Found]:
            heads = {key: self._head(generation, txn, key) for key in keys}
            return {key: stored.found() for key, stored in heads.items() if stored is not None}

        return self._read(collect, {})

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        """For each content key that is served here, the key of the record that serves it best."""

        def collect(generation: Generation, txn: Any) -> dict[bytes, bytes]:
            candidates = {content: read_donors(generation, txn, content) for content in contents}
            return {c: best_donor(donors).key for c, donors in candidates.items() if donors}

        return self._read(collect, {})

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        """Verify and decode records into each item's ``out``; one outcome per item, in order."""
        outcomes = [self._load(item) for item in items]
        hits = [item.key for item, loaded in zip(items, outcomes, strict=True) if loaded.ok]
        self._counters.add("disk_hits", len(hits))
        self._counters.add("disk_misses", len(items) - len(hits))
        self._note(self._touched, hits)
        return outcomes

    def read(self, keys: Sequence[bytes]) -> dict[bytes, EncodedRecord]:
        """Records as they are stored, for another node; it verifies what it receives."""

        def collect(generation: Generation, txn: Any) -> dict[bytes, EncodedRecord]:
            records: dict[bytes, EncodedRecord] = {}
            for key in keys:
                try:
                    record = get_encoded(generation, txn, key)
                except CorruptRecord:
                    self._note_damage(key)
                    continue
                if record is not None:
                    records[key] = record
            return records

        return self._read(collect, {})

    def keys(self) -> list[bytes]:
        """Everything stored now."""

        def collect(generation: Generation, txn: Any) -> list[bytes]:
            with txn.cursor(db=generation.heads) as cursor:
                return [bytes(key) for key in cursor.iternext(values=False)]

        return self._read(collect, [])

    def take_report(self) -> ReadReport:
        """What the shard's writer should know; starts a new report."""
        with self._report_lock:
            report = ReadReport(tuple(self._touched), tuple(self._damaged))
            self._touched.clear()
            self._damaged.clear()
        return report

    def counters(self) -> dict[str, int]:
        """Counts since start."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Release the environment; later reads are misses."""
        self._source.close()

    def _load(self, item: LoadItem) -> Loaded:
        def fetch(generation: Generation, txn: Any) -> tuple[StoredHead, np.ndarray] | None:
            stored = get_head(generation, txn, item.key)
            if stored is None or not item.accepts(stored.head):
                return None
            body = self._scratch.take(stored.head.body_bytes)
            read_body(generation, txn, stored, body)
            return stored, body

        try:
            fetched = self._read(fetch, None)
            if fetched is None:
                return _MISS
            stored, body = fetched
            # Outside the transaction: a long one keeps freed pages from being used again.
            decode(stored.head, body.data, item.out)
        except CorruptRecord:
            self._note_damage(item.key)
            return _MISS
        return Loaded(ok=True, tier=Tier.DISK, stored_bytes=stored.size_bytes)

    def _head(self, generation: Generation, txn: Any, key: bytes) -> StoredHead | None:
        try:
            return get_head(generation, txn, key)
        except CorruptRecord:
            self._note_damage(key)
            return None

    def _read(self, work: Callable[[Generation, Any], T], otherwise: T) -> T:
        """Run ``work`` in a read transaction; an environment that cannot be read is a miss."""
        try:
            with (
                self._slots,
                self._source.lease() as generation,
                generation.env.begin(buffers=True) as txn,
            ):
                return work(generation, txn)
        except (StoreUnavailable, lmdb.Error):
            self._counters.add("disk_read_errors")
            return otherwise

    def _note_damage(self, key: bytes) -> None:
        self._counters.add("disk_corrupt")
        self._note(self._damaged, [key])

    def _note(self, into: dict[bytes, None], keys: Iterable[bytes]) -> None:
        with self._report_lock:
            if len(into) < _MAX_REPORTED_KEYS:
                into.update(dict.fromkeys(keys))


class _Scratch(threading.local):
    """A buffer per thread for joined bodies, so that loads do not fault in fresh pages."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """``size`` bytes, overwritten by this thread's next call."""
        if size > _KEPT_SCRATCH_BYTES:
            return np.empty(size, np.uint8)
        if size > len(self._buffer):
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]
