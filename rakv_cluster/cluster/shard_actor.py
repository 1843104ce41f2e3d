"""One node's part of the cluster store: its shard's only writer, and its directory partition.

A thin asynchronous Ray actor. Its event loop runs the directory and the leases, which never wait;
LMDB runs on the writer's own thread and a few reading ones. Workers of the node read the shard's
files themselves and come here only to write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rakv_cluster.clock import SystemClock
from rakv_cluster.cluster.announcing import AnnouncingThread
from rakv_cluster.cluster.directory import (
    Announcement,
    Announcer,
    Changes,
    DirectoryPartition,
    Position,
)
from rakv_cluster.cluster.leases import Lease, LeaseTable
from rakv_cluster.cluster.messages import Committed, ShardInfo
from rakv_cluster.cluster.peers import Peers
from rakv_cluster.cluster.ray_transport import RayTransport
from rakv_cluster.cluster.remote import RemoteShards
from rakv_cluster.cluster.settings import ClusterStoreSettings
from rakv_cluster.kv.codec import EncodedRecord
from rakv_cluster.store.base import Found, StoreStats
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.lmdb_shard import ShardReader, ShardWriter, WriterSource

_log = logging.getLogger(__name__)

T = TypeVar("T")

_COUNTERS = ("commits_dropped", "reads_served")


class ShardActor:
    """Made by the node manager on the node it serves; raises ``StoreError`` where it cannot."""

    def __init__(self, node: str, folder: str, settings: ClusterStoreSettings) -> None:
        self._settings = settings
        self._limits = settings.actor
        self._path = Path(settings.folder) / folder
        self._node = node
        self._incarnation = uuid.uuid4().hex
        self._nodes: tuple[str, ...] = ()
        self._counters = Counters(_COUNTERS)
        clock = SystemClock()
        self._writer = ShardWriter(self._path, settings.shard, clock)
        self._reader = ShardReader(WriterSource(self._writer))
        self._gate = _ByteGate(self._limits.queue_bytes)
        self._writing = ThreadPoolExecutor(1, "shard-commit")
        self._reading = ThreadPoolExecutor(self._limits.reader_threads, "shard-read")
        self._partition = DirectoryPartition(self._incarnation)
        self._leases = LeaseTable(clock)
        transport = RayTransport(settings.service, settings.namespace)
        peers = Peers(transport, settings.client.breaker, clock)
        self._remote = RemoteShards(node, peers, settings.client, clock, keep=self._commit_now)
        self._announcing = AnnouncingThread(
            Announcer(node, self._incarnation, batch_keys=self._limits.batch_keys),
            peers,
            self._stored_keys,
            clock,
            heartbeat_s=self._limits.heartbeat_s,
            timeout_s=self._limits.announce_timeout_s,
        )

    # Life.

    async def info(self) -> ShardInfo:
        """Who and where this shard is, and who the others are."""
        return ShardInfo(self._node, str(self._path), self._incarnation, os.getpid(), self._nodes)

    async def set_nodes(self, nodes: Sequence[str]) -> ShardInfo:
        """The node manager's word on which nodes have a shard; returns :meth:`info`."""
        if tuple(nodes) != self._nodes:
            self._nodes = tuple(nodes)
            self._partition.set_live(self._nodes)
            self._announcing.set_nodes(self._nodes)
            self._remote.set_nodes(self._nodes)
        return await self.info()

    async def close(self) -> bool:
        """Write what is pending and release the folder, so that another actor can follow."""
        await asyncio.to_thread(self._close)
        return True

    async def stats(self) -> StoreStats:
        """The shard's sizes, counters of writer, reader and actor, and what the directory holds."""
        stats = await asyncio.to_thread(self._writer.stats)
        pinned = await asyncio.to_thread(self._writer.pinned)
        counters = {
            **stats.counters,
            **self._reader.counters(),
            **self._counters.snapshot(),
            "pinned_records": len(pinned),
            "directory_keys": len(self._partition),
            "directory_overflowed": self._partition.overflowed,
            "leases": len(self._leases),
        }
        return StoreStats(stats.records, stats.stored_bytes, stats.budget_bytes, counters)

    # The directory partition and its leases.

    async def announce(self, message: Announcement) -> bool:
        """See :meth:`DirectoryPartition.announce`. What can be found needs no lease any more."""
        accepted = self._partition.announce(message)
        if accepted:
            self._leases.fulfilled(message.added)
        return accepted

    async def locate(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        """See :meth:`DirectoryPartition.locate`."""
        return self._partition.locate(keys)

    async def changes(self, since: Position, limit: int) -> Changes:
        """See :meth:`DirectoryPartition.changes`."""
        return self._partition.changes(since, min(limit, self._limits.batch_keys))

    async def acquire(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> dict[bytes, Lease]:
        """See :meth:`LeaseTable.acquire`."""
        return self._leases.acquire(keys, holder, ttl_s)

    async def release(self, keys: Sequence[bytes], holder: str) -> bool:
        """See :meth:`LeaseTable.release`."""
        self._leases.release(keys, holder)
        return True

    # Records.

    async def commit(self, records: Sequence[EncodedRecord]) -> Committed:
        """Store a batch; while too much waits for the disk, drop it and say so."""
        size_bytes = sum(record.nbytes for record in records)
        if not self._gate.enter(size_bytes):
            self._counters.add("commits_dropped", len(records))
            return Committed(0, dropped=len(records))
        loop = asyncio.get_running_loop()
        # A caller that gives up cancels the wait, not the commit.
        return await asyncio.shield(
            loop.run_in_executor(self._writing, self._commit, records, size_bytes)
        )

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Those of ``keys`` that are stored here; at most a batch of them."""
        wanted = keys[: self._limits.batch_keys]
        return await self._read_with(lambda: self._reader.find(wanted))

    async def read(self, keys: Sequence[bytes]) -> dict[bytes, EncodedRecord]:
        """Records for another node, in order, until an answer is full; it verifies them."""
        return await self._read_with(lambda: self._records(keys))

    async def report(self, touched: Sequence[bytes], damaged: Sequence[bytes]) -> bool:
        """What a reader on this node saw: records in use, and ones that did not verify."""
        self._writer.touch(touched)
        if damaged:
            await asyncio.to_thread(self._writer.discard, damaged)
        return True

    async def delete(self, keys: Sequence[bytes]) -> list[bytes]:
        """Remove records; returns the keys that were there."""
        there = list(await self.find(keys))
        await asyncio.to_thread(self._writer.delete, there)
        self._announcing.record((), there)
        return there

    async def clear(self, namespace: bytes) -> int:
        """Remove every record of a namespace; returns how many there were."""
        removed = await asyncio.to_thread(self._writer.clear, namespace)
        self._announcing.recheck()
        return removed

    async def pin(self, keys: Sequence[bytes], owner: str, ttl_s: float) -> list[bytes]:
        """See :meth:`ShardWriter.pin`."""
        return await asyncio.to_thread(self._writer.pin, keys, owner, ttl_s)

    async def unpin(self, keys: Sequence[bytes], owner: str) -> int:
        """See :meth:`ShardWriter.unpin`."""
        return await asyncio.to_thread(self._writer.unpin, keys, owner)

    async def warm(self, keys: Sequence[bytes]) -> list[bytes]:
        """Copy records from other nodes; returns those of ``keys`` that are here now."""
        return await asyncio.to_thread(self._warm, keys[: self._limits.batch_keys])

    async def hottest(self, limit_bytes: int) -> list[bytes]:
        """Keys in use last, first those used last; a batch of them at most."""
        limit = self._limits.batch_keys
        return await asyncio.to_thread(self._writer.hottest, limit, limit_bytes)

    async def _read_with(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, read)

    # On other threads.

    def _commit(self, records: Sequence[EncodedRecord], size_bytes: int) -> Committed:
        try:
            return self._commit_now(records)
        finally:
            self._gate.leave(size_bytes)

    def _commit_now(self, records: Sequence[EncodedRecord]) -> Committed:
        result = self._writer.commit(records)
        self._announcing.record(result.stored, result.evicted)
        return Committed(len(result.stored) + result.duplicates, refused=result.refused)

    def _warm(self, keys: Sequence[bytes]) -> list[bytes]:
        here = self._reader.find(keys)
        elsewhere = self._remote.find([key for key in keys if key not in here])
        self._commit_now(list(self._remote.fetch(list(elsewhere)).values()))
        return list(self._reader.find(keys))

    def _records(self, keys: Sequence[bytes]) -> dict[bytes, EncodedRecord]:
        records: dict[bytes, EncodedRecord] = {}
        room = self._limits.reply_bytes
        for key in keys:
            records |= self._reader.read([key])
            room -= records[key].nbytes if key in records else 0
            if room <= 0:
                break
        self._counters.add("reads_served", len(records))
        self._writer.touch(records)
        return records

    def _stored_keys(self) -> list[bytes]:
        report = self._reader.take_report()
        if report.damaged:
            self._writer.discard(report.damaged)
        return self._writer.keys()

    def _close(self) -> None:
        self._announcing.close()
        self._writing.shutdown()
        self._reading.shutdown()
        self._reader.close()
        self._writer.close()


class _ByteGate:
    """Lets in at most ``limit_bytes`` at a time."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._inside_bytes = 0

    def enter(self, size_bytes: int) -> bool:
        """Whether there is room for ``size_bytes``, which is then taken."""
        with self._lock:
            if self._inside_bytes + size_bytes > self._limit_bytes:
                return False
            self._inside_bytes += size_bytes
            return True

    def leave(self, size_bytes: int) -> None:
        """Give back what :meth:`enter` took."""
        with self._lock:
            self._inside_bytes -= size_bytes
