"""Shards of several nodes in one process, with faults to switch on: for tests of store clients.

Contract: a :class:`~rakv_cluster.cluster.peers.Transport`. Records live in dicts; the directory
knows every change at once unless it is told to lie. Faults concern whole calls to a node:

    gone     no such actor
    late     no answer within the call's time, which passes on the clock
    raises   the method raises
    garbage  an answer of the wrong type or shape, or a record whose bytes are damaged

What a shard without a fault answers is the truth.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate

import numpy as np

from rakv_cluster.cluster.leases import Lease, LeaseTable
from rakv_cluster.cluster.messages import Committed, ShardInfo
from rakv_cluster.cluster.peers import Answer, Call, Failed, Failure
from rakv_cluster.cluster.placement import Placement
from rakv_cluster.kv.codec import EncodedRecord, parse_head
from rakv_cluster.store.base import Found, StoreStats
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.types import Tier


class Fault(str, Enum):
    """What is wrong with a node's shard."""

    NONE = "none"
    GONE = "gone"
    LATE = "late"
    RAISES = "raises"
    GARBAGE = "garbage"


class SimulatedShards:
    """Nodes, their records and their faults. Deterministic given ``rng``."""

    def __init__(self, nodes: Sequence[str], clock: ManualClock, rng: np.random.Generator) -> None:
        self.nodes = tuple(nodes)
        self.records: dict[str, dict[bytes, EncodedRecord]] = {node: {} for node in nodes}
        self.faults = dict.fromkeys(nodes, Fault.NONE)
        self.lies: dict[bytes, str] = {}
        self.calls: list[Call] = []
        self.pins: set[tuple[str, bytes, str]] = set()
        self._clock = clock
        self._rng = rng
        # Stores call from threads of their own, too.
        self._lock = threading.Lock()
        self._leases = {node: LeaseTable(clock) for node in nodes}

    def hold(self, node: str, record: EncodedRecord) -> None:
        """Store a record on a node; whoever holds a lease on it has done his part."""
        self.records[node][record.key] = record
        for leases in self._leases.values():
            leases.fulfilled([record.key])

    def call(self, calls: Sequence[Call], timeout_s: float) -> list[Answer[object] | Failed]:
        with self._lock:
            self.calls.extend(calls)
            outcomes = [self._outcome(call) for call in calls]
            if Failed(Failure.LATE) in outcomes:
                self._clock.advance(timeout_s)
            return outcomes

    def _outcome(self, call: Call) -> Answer[object] | Failed:
        fault = self.faults.get(call.node, Fault.GONE)
        failures = {
            Fault.GONE: Failure.GONE, Fault.LATE: Failure.LATE, Fault.RAISES: Failure.RAISED
        }  # fmt: skip
        if fault in failures:
            return Failed(failures[fault])
        method: Callable[..., object] = getattr(self, f"_{call.method}")
        answer = method(call.node, *call.args)
        return Answer(self._garbled(answer) if fault is Fault.GARBAGE else answer)

    def _garbled(self, answer: object) -> object:
        records = list(answer.values()) if isinstance(answer, dict) else []
        if records and isinstance(records[0], EncodedRecord) and self._rng.random() < 0.8:
            return {record.key: self._damaged(record) for record in records}
        junk: list[object] = [None, 7, b"junk", [answer], {"key": 1}, {b"k" * 32: None}]
        return junk[int(self._rng.integers(len(junk)))]

    def _damaged(self, record: EncodedRecord) -> EncodedRecord:
        field = "head" if self._rng.random() < 0.5 else "body"
        data = bytearray(getattr(record, field))
        data[int(self._rng.integers(len(data)))] ^= 1 << int(self._rng.integers(8))
        return dataclasses.replace(record, **{field: bytes(data)})

    # The methods of ShardActor that clients call.

    def _info(self, node: str) -> ShardInfo:
        return ShardInfo(node, f"/{node}", "1", 1, self.nodes)

    def _locate(self, node: str, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        placement = Placement(self.nodes)
        located = {}
        for key in keys:
            holders = tuple(name for name in self.nodes if key in self.records[name])
            holders = (self.lies[key],) if key in self.lies else holders
            if holders and placement.owner(key) == node:
                located[key] = holders
        return located

    def _find(self, node: str, keys: Sequence[bytes]) -> dict[bytes, Found]:
        held = self.records[node]
        return {key: _found(held[key]) for key in keys if key in held}

    def _read(self, node: str, keys: Sequence[bytes]) -> dict[bytes, EncodedRecord]:
        return {key: self.records[node][key] for key in keys if key in self.records[node]}

    def _commit(self, node: str, records: Sequence[EncodedRecord]) -> Committed:
        for record in records:
            self.hold(node, record)
        return Committed(len(records))

    def _delete(self, node: str, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if self.records[node].pop(key, None) is not None]

    def _pin(self, node: str, keys: Sequence[bytes], owner: str, ttl_s: float) -> list[bytes]:
        held = list(self._read(node, keys))
        self.pins |= {(node, key, owner) for key in held}
        return held

    def _unpin(self, node: str, keys: Sequence[bytes], owner: str) -> int:
        ended = self.pins & {(node, key, owner) for key in keys}
        self.pins -= ended
        return len(ended)

    def _clear(self, node: str, namespace: bytes) -> int:
        held = self.records[node].items()
        theirs = [key for key, r in held if parse_head(r.head).namespace == namespace]
        return len(self._delete(node, theirs))

    def _warm(self, node: str, keys: Sequence[bytes]) -> list[bytes]:
        for other in self.nodes:
            self._commit(node, list(self._read(other, keys).values()))
        return list(self._read(node, keys))

    def _hottest(self, node: str, limit_bytes: int) -> list[bytes]:
        order = list(self.records[node].items())[::-1]
        sizes = accumulate(record.nbytes for _, record in order)
        return [key for (key, _), total in zip(order, sizes, strict=True) if total <= limit_bytes]

    def _report(self, node: str, touched: Sequence[bytes], damaged: Sequence[bytes]) -> bool:
        for key in damaged:
            self.records[node].pop(key, None)
        return True

    def _stats(self, node: str) -> StoreStats:
        held = self.records[node].values()
        return StoreStats(len(held), sum(record.nbytes for record in held), 1 << 30, {})

    def _acquire(
        self, node: str, keys: Sequence[bytes], holder: str, ttl_s: float
    ) -> dict[bytes, Lease]:
        return self._leases[node].acquire(keys, holder, ttl_s)

    def _release(self, node: str, keys: Sequence[bytes], holder: str) -> bool:
        self._leases[node].release(keys, holder)
        return True


def _found(record: EncodedRecord) -> Found:
    head = parse_head(record.head)
    return Found(
        head.token_ids, Tier.DISK, record.nbytes, head.cost_ms, head.numeric_class,
        head.namespace, head.start, head.created_s, head.lossless,
    )  # fmt: skip
