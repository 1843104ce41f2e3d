"""The disk tier: ``ShardWriter`` and ``ShardReader`` across processes, ``LmdbStore`` in one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rakv_cluster.clock import Clock
from rakv_cluster.errors import StoreError
from rakv_cluster.kv.codec import Codec, encode
from rakv_cluster.store.base import ChunkRecord, ChunkStore, Found, Loaded, LoadItem, StoreStats
from rakv_cluster.store.generation import Generation
from rakv_cluster.store.null import NullStore
from rakv_cluster.store.shard_core import CommitResult
from rakv_cluster.store.shard_reader import ReadReport, ShardReader
from rakv_cluster.store.shard_writer import ShardSettings, ShardWriter

__all__ = [
    "CommitResult",
    "LmdbStore",
    "ReadReport",
    "ShardReader",
    "ShardSettings",
    "ShardWriter",
    "open_store",
]

_log = logging.getLogger(__name__)


def open_store(
    path: str | os.PathLike[str], settings: ShardSettings, clock: Clock, codec: Codec = Codec.SPLIT
) -> ChunkStore:
    """This process's disk tier; if the folder cannot be used, one that takes and finds nothing.

    A cache that cannot be opened must not keep a service from starting: the reason is logged, and
    the counter ``store_unavailable`` is 1.
    """
    try:
        return LmdbStore(ShardWriter(path, settings, clock), codec)
    except StoreError as error:
        _log.error("serving without the disk tier: %s", error)
        return NullStore({"store_unavailable": 1})


class WriterSource:
    """Lends a writer's environment to readers in the same process."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer

    @contextmanager
    def lease(self) -> Iterator[Generation]:
        generation = self._writer.generation
        with generation.lease():
            yield generation

    def close(self) -> None:
        """Nothing of its own is open."""


class LmdbStore:
    """A shard written and read by this process, as a :class:`~.base.ChunkStore`.

    Encoding runs in the caller's thread; put a :class:`~.tiered.TieredStore` in front to move it
    to the background.
    """

    def __init__(self, writer: ShardWriter, codec: Codec = Codec.SPLIT) -> None:
        self._writer = writer
        self._reader = ShardReader(WriterSource(writer))
        self._codec = codec

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        return self._reader.find(keys)

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        outcomes = self._reader.load(items)
        report = self._reader.take_report()
        self._writer.touch(report.touched)
        if report.damaged:
            self._writer.discard(report.damaged)
        return outcomes

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        return self._reader.donors(contents)

    def put(self, records: Sequence[ChunkRecord]) -> int:
        result = self._writer.commit([encode(record, self._codec) for record in records])
        return len(result.stored) + result.duplicates

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._writer.delete(keys)

    def stats(self) -> StoreStats:
        stats = self._writer.stats()
        counters = {**stats.counters, **self._reader.counters()}
        return StoreStats(stats.records, stats.stored_bytes, stats.budget_bytes, counters)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
