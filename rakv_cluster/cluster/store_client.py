"""The cluster's store as one process sees it: a :class:`~rakv_cluster.store.base.ChunkStore`.

This node's records are read from its LMDB files directly, in this process. What is missing there
comes from other nodes' shards, and then fills this node's. Fault contract: that of the protocol. A
shard that is dead, slow or broken costs at most the deadline, is a miss and a counter, and is then
left alone for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.messages import (
    ShardInfo,
    parse_committed,
    parse_flag,
    parse_info,
    parse_keys,
    parse_stats,
)
from rakv_cluster.cluster.peers import Answer, Call, Peers, Transport
from rakv_cluster.cluster.remote import RemoteShards
from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.cluster.single_flight import claim, release
from rakv_cluster.kv.codec import Codec, EncodedRecord, encode
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import Found, Loaded, LoadItem, StoreStats
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.flight import Claim
from rakv_cluster.store.lmdb_shard import ShardReader
from rakv_cluster.store.worker_thread import WorkerThread
from rakv_cluster.types import Tier

_COUNTERS = ("writes_taken", "writes_lost", "fills_taken", "fills_lost")


class NodeStore:
    """Reads from any node, writes to this one's shard. Methods may be called from any thread.

    Usable before its shard is: until the first answer everything is a miss. :meth:`refresh`,
    every ``limits.refresh_s`` in the background, learns the shard's folder and the live nodes, and
    reports which records are in use. ``put`` encodes and sends in the caller's thread; a
    :class:`~rakv_cluster.store.tiered.TieredStore` in front moves it to the background.
    """

    def __init__(
        self,
        node: str,
        transport: Transport,
        limits: ClientLimits,
        clock: Clock,
        open_reader: Callable[[str], ShardReader] = ShardReader,
        *,
        codec: Codec = Codec.SPLIT,
    ) -> None:
        self._codec = codec
        self._node = node
        self._limits = limits
        self._clock = clock
        self._open_reader = open_reader
        self._closed = threading.Event()
        self._peers = Peers(transport, limits.breaker, clock)
        self._remote = RemoteShards(node, self._peers, limits, clock, self._fill)
        self._counters = Counters(_COUNTERS)
        self._lock = threading.Lock()
        self._readers: dict[str, ShardReader] = {}  # this node's folder, once it is known
        self._info = ShardInfo(node, "", "", 0, ())
        self._filler = WorkerThread("rakv-store-fill", queue_limit=limits.fill_batches)
        self._refresher = WorkerThread(
            "rakv-store-refresh",
            queue_limit=1,
            on_idle=self._refresh_in_background,
            idle_s=limits.refresh_s,
        )

    # ChunkStore.

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        found: dict[bytes, Found] = {}
        for reader in self._local():
            found |= reader.find(keys)
        missing = [key for key in keys if key not in found]
        return found | self._remote.find(missing) if missing else found

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        outcomes = [Loaded(ok=False, tier=Tier.DISK) for _ in items]
        for reader in self._local():
            outcomes = reader.load(items)
        missed = [index for index, loaded in enumerate(outcomes) if not loaded.ok]
        if missed:
            fetched = self._remote.load([items[index] for index in missed])
            for index, loaded in zip(missed, fetched, strict=True):
                outcomes[index] = loaded
        return outcomes

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        """Of this node's own records."""
        known: dict[bytes, bytes] = {}
        for reader in self._local():
            known |= reader.donors(contents)
        return known

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """Encode and send to this node's shard; returns how many it took within the deadline.

        Raises ``ValueError`` for a record that contradicts its own layout.
        """
        taken = sum(
            self._commit(batch)
            for batch in self._batches([encode(record, self._codec) for record in records])
        )
        self._counters.add("writes_taken", taken)
        self._counters.add("writes_lost", len(records) - taken)
        return taken

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove from every node that answers; returns how many keys were on any."""
        size = self._limits.batch_keys
        calls = [
            Call(node, "delete", (list(keys[start : start + size]),))
            for node in self._info.nodes
            for start in range(0, len(keys), size)
        ]
        outcomes = self._peers.ask(calls, self._limits.write_timeout_s, parse_keys)
        gone = {key for outcome in outcomes if isinstance(outcome, Answer) for key in outcome.value}
        return len(gone.intersection(keys))

    def hottest(self, limit_bytes: int) -> list[bytes]:
        """Keys of records used last, those used last first, at most ``limit_bytes`` of each node.

        Nodes take turns, this one begins; one that does not answer within ``load_timeout_s``, which
        no request waits for, has none.
        """
        nodes = sorted(self._info.nodes, key=lambda node: node != self._node)
        calls = [Call(node, "hottest", (limit_bytes,)) for node in nodes]
        outcomes = self._peers.ask(calls, self._limits.load_timeout_s, parse_keys)
        answers = [outcome.value for outcome in outcomes if isinstance(outcome, Answer)]
        turns = zip_longest(*answers)
        return list(dict.fromkeys(key for turn in turns for key in turn if key is not None))

    def stats(self) -> StoreStats:
        """Sizes and counters of this node's shard, with this process's own counters."""
        own = self._counters.snapshot() | self._remote.counters()
        for reader in self._local():
            own |= {f"local_{name}": count for name, count in reader.counters().items()}
        call = Call(self._node, "stats")
        (outcome,) = self._peers.ask([call], self._limits.lookup_timeout_s, parse_stats)
        if not isinstance(outcome, Answer):
            return StoreStats(records=0, stored_bytes=0, budget_bytes=0, counters=own)
        shard = outcome.value
        counters = {**shard.counters, **own}
        return StoreStats(shard.records, shard.stored_bytes, shard.budget_bytes, counters)

    def close(self) -> None:
        self._closed.set()
        self._refresher.close()
        self._filler.close()
        for reader in self._local():
            reader.close()

    # Single flight.

    def claim(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> Claim:
        """See :class:`~rakv_cluster.store.flight.SingleFlight`."""
        timeout_s = self._limits.lookup_timeout_s
        placement = self._remote.placement
        return claim(self._peers, placement, keys, holder, ttl_s=ttl_s, timeout_s=timeout_s)

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """See :class:`~rakv_cluster.store.flight.SingleFlight`."""
        timeout_s = self._limits.lookup_timeout_s
        release(self._peers, self._remote.placement, keys, holder, timeout_s=timeout_s)

    def await_records(self, keys: Sequence[bytes], timeout_s: float) -> dict[bytes, Found]:
        """:meth:`find`, repeated until all ``keys`` are there, at most for ``timeout_s``.

        For records that others compute. Blocks its thread and holds nothing else.
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        found = self.find(keys)
        while len(found) < len(set(keys)) and self._clock.monotonic_s() < deadline_s:
            self._closed.wait(self._limits.await_poll_s)
            found |= self.find([key for key in keys if key not in found])
        return found

    # Housekeeping.

    def refresh(self) -> bool:
        """Ask this node's shard who it is and who lives; whether it answered.

        Tells it which of its records this process used, and which it found damaged. No request
        waits for it: a shard that is only busy must not count as broken, which would cost the next
        write.
        """
        timeout_s = self._limits.load_timeout_s
        (outcome,) = self._peers.ask([Call(self._node, "info")], timeout_s, parse_info)
        if not isinstance(outcome, Answer):
            return False
        self._adopt(outcome.value)
        for reader in self._local():
            report = reader.take_report()
            if report.touched or report.damaged:
                call = Call(self._node, "report", (report.touched, report.damaged))
                self._peers.ask([call], timeout_s, parse_flag)
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until this node's shard has what was loaded from others; whether it has."""
        return self._filler.drain(timeout_s)

    def _refresh_in_background(self) -> None:
        self.refresh()

    def _adopt(self, info: ShardInfo) -> None:
        with self._lock:
            if info.folder not in self._readers:
                for reader in self._readers.values():
                    reader.close()
                self._readers = {info.folder: self._open_reader(info.folder)}
            changed = info.nodes != self._info.nodes
            self._info = info
        if changed:
            self._remote.set_nodes(info.nodes)

    def _local(self) -> list[ShardReader]:
        """The reader of this node's shard; none until its folder is known."""
        with self._lock:
            return list(self._readers.values())

    # Writes.

    def _fill(self, records: Sequence[EncodedRecord]) -> None:
        for batch in self._batches(records):
            if not self._filler.post(partial(self._fill_now, batch)):
                self._counters.add("fills_lost", len(batch))

    def _fill_now(self, batch: Sequence[EncodedRecord]) -> None:
        taken = self._commit(batch)
        self._counters.add("fills_taken", taken)
        self._counters.add("fills_lost", len(batch) - taken)

    def _commit(self, batch: Sequence[EncodedRecord]) -> int:
        call = Call(self._node, "commit", (batch,))
        (outcome,) = self._peers.ask([call], self._limits.write_timeout_s, parse_committed)
        return outcome.value.taken if isinstance(outcome, Answer) else 0

    def _batches(self, records: Sequence[EncodedRecord]) -> Iterator[list[EncodedRecord]]:
        """Runs of records, each within the size of a batch but of at least one."""
        batch: list[EncodedRecord] = []
        for record in records:
            held_bytes = sum(other.nbytes for other in batch)
            if batch and held_bytes + record.nbytes > self._limits.batch_bytes:
                yield batch
                batch = []
            batch.append(record)
        if batch:
            yield batch
