"""A shard's records and their budget: everything that happens inside a write transaction.

Single-threaded: :class:`~.shard_writer.ShardWriter` runs it on its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import lmdb

from rakv_cluster.clock import Clock
from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.codec import EncodedRecord, RecordHead, parse_head, verify_body
from rakv_cluster.store.base import serves
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.counters import Counters
from rakv_cluster.store.eviction import Entry
from rakv_cluster.store.generation import (
    Generation,
    charged_bytes,
    delete_record,
    get_head,
    put_entry,
    put_record,
    read_index,
    tick,
)

CORE_COUNTERS = (
    "disk_puts", "disk_duplicates", "disk_refused_large", "disk_refused_damaged",
    "disk_refused_full", "disk_evictions", "disk_deletes", "disk_map_full",
)  # fmt: skip

_EXTRA_EVICTION = 0.05  # of the budget, when the map is full although the budget is not
_RECORD_SHARE = 4  # a record may take a quarter of the budget: one must not push out all others


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a batch: keys stored anew, keys that left for them, records not taken."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    duplicates: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Incoming:
    record: EncodedRecord
    head: RecordHead
    size_bytes: int

    def entry(self, now_s: float) -> Entry:
        head = self.head
        return Entry(
            head.namespace, self.size_bytes, len(head.token_ids), head.start, head.cost_ms,
            head.created_s, now_s,
        )  # fmt: skip


class ShardCore:
    """Records of one open generation. Raises ``lmdb.Error`` only for damage or a failing disk."""

    def __init__(
        self, generation: Generation, catalog: Catalog, clock: Clock, counters: Counters
    ) -> None:
        """Read the index; raises ``CorruptRecord`` if it cannot be read."""
        self.generation = generation
        self.catalog = catalog
        self._clock = clock
        self._counters = counters
        self._record_ids: dict[bytes, int] = {}
        self._unsaved_uses: set[bytes] = set()
        try:
            with generation.env.begin() as txn:
                rows = list(read_index(generation, txn))
        except lmdb.Error as error:
            raise CorruptRecord(f"{generation.path} is damaged: {error}") from error
        # In the order of last use, so that a policy that keeps its own order finds it again.
        for key, record_id, entry in sorted(rows, key=lambda row: (row[2].last_use_s, row[1])):
            catalog.add(key, entry)
            self._record_ids[key] = record_id
        self._next_id = max(self._record_ids.values(), default=0) + 1

    def commit(self, batch: Sequence[EncodedRecord]) -> CommitResult:
        """Store a batch, evicting first; all of it in one transaction."""
        incoming, duplicates, refused = self._admit(batch)
        if not incoming:
            return CommitResult(duplicates=duplicates, refused=refused)
        replaced = [item.record.key for item in incoming if item.record.key in self.catalog]
        freed = sum(self.catalog[key].size_bytes for key in replaced)
        needed = sum(item.size_bytes for item in incoming) - freed
        evicted = self.catalog.victims(needed, spare=replaced)
        try:
            self._write(incoming, evicted, replaced)
        except lmdb.MapFullError:
            self._counters.add("disk_map_full")
            more = self._make_room([*replaced, *evicted])
            evicted = [key for key in (*evicted, *more) if key not in replaced]
            try:
                self._write(incoming, [], [])
            except lmdb.MapFullError:
                self._counters.add("disk_refused_full", len(incoming))
                return CommitResult((), (*replaced, *evicted), duplicates, len(batch))
        self._counters.add("disk_puts", len(incoming))
        stored = tuple(item.record.key for item in incoming)
        return CommitResult(stored, tuple(evicted), duplicates, refused)

    def delete(self, keys: Iterable[bytes]) -> int:
        """Remove records; returns how many were there."""
        known = [key for key in dict.fromkeys(keys) if key in self.catalog]
        self._remove(known, evicted=False)
        self._counters.add("disk_deletes", len(known))
        return len(known)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count uses in memory; the next transaction writes them."""
        known = [key for key in keys if key in self.catalog]
        self.catalog.touch(known, self._clock.wall_s())
        self._unsaved_uses.update(known)

    def save_uses(self) -> None:
        """Write counted uses without waiting for the next batch."""
        if self._unsaved_uses:
            self._transact(lambda txn: None)

    def shrink(self) -> list[bytes]:
        """Evict down to the budget (it may have been lowered); returns what left."""
        victims = self.catalog.victims(0)
        self._remove(victims, evicted=True)
        return victims

    def _admit(self, batch: Sequence[EncodedRecord]) -> tuple[list[_Incoming], int, int]:
        """Records of a batch to be written, and how many are duplicates and refused."""
        incoming: dict[bytes, _Incoming] = {}
        duplicates = refused = 0
        room = self.catalog.budget_bytes // _RECORD_SHARE
        for record in batch:
            size = charged_bytes(len(record.head), len(record.body))
            if size > room:
                self._counters.add("disk_refused_large")
                refused += 1
                continue
            try:
                head = parse_head(record.head)
                verify_body(head, record.body)
            except CorruptRecord:
                self._counters.add("disk_refused_damaged")
                refused += 1
                continue
            if self._has(head):
                duplicates += 1
                continue
            incoming[head.key] = _Incoming(record, head, size)
        self._counters.add("disk_duplicates", duplicates)
        return list(incoming.values()), duplicates, refused

    def _has(self, head: RecordHead) -> bool:
        if head.key not in self.catalog:
            return False
        try:
            with self.generation.env.begin(buffers=True) as txn:
                stored = get_head(self.generation, txn, head.key)
        except CorruptRecord:
            return False
        return stored is not None and serves(stored.found(), head.token_ids, head.numeric_class)

    def _write(
        self, incoming: Sequence[_Incoming], evicted: Sequence[bytes], replaced: Sequence[bytes]
    ) -> None:
        now_s = self._clock.wall_s()
        entries = [item.entry(now_s) for item in incoming]

        def body(txn: Any) -> None:
            self._delete_in(txn, (*replaced, *evicted))
            for record_id, (item, entry) in enumerate(
                zip(incoming, entries, strict=True), self._next_id
            ):
                put_record(self.generation, txn, record_id, item.record, entry)

        self._transact(body)
        self._forget(replaced, evicted=False)
        self._forget(evicted, evicted=True)
        # The last chunk of a prompt becomes the oldest: it is worth nothing without the others.
        for item, entry in sorted(
            zip(incoming, entries, strict=True), key=lambda pair: -pair[1].start
        ):
            self.catalog.add(item.record.key, entry)
        for record_id, item in enumerate(incoming, self._next_id):
            self._record_ids[item.record.key] = record_id
        self._next_id += len(incoming)

    def _make_room(self, leaving: Sequence[bytes]) -> list[bytes]:
        """After MapFull: evict in a transaction of its own, and let its pages become usable.

        Pages freed by one transaction can be used by the second one after it, and only once no
        reader (dead ones included) still sees them. Returns what left beyond ``leaving``.
        """
        self.generation.env.reader_check()
        extra_bytes = int(self.catalog.budget_bytes * _EXTRA_EVICTION)
        slack = self.catalog.budget_bytes - self.catalog.used_bytes
        more = self.catalog.victims(slack + extra_bytes, spare=leaving)
        self._remove([*leaving, *more], evicted=True)
        for _ in range(2):
            self._transact(lambda txn: tick(self.generation, txn))
        return more

    def _remove(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        if not keys:
            return
        self._transact(lambda txn: self._delete_in(txn, keys))
        self._forget(keys, evicted=evicted)

    def _delete_in(self, txn: Any, keys: Iterable[bytes]) -> None:
        for key in keys:
            delete_record(self.generation, txn, key, self._record_ids[key])

    def _forget(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        for key in keys:
            self.catalog.remove(key, evicted=evicted)
            del self._record_ids[key]
        self._unsaved_uses.difference_update(keys)
        if evicted:
            self._counters.add("disk_evictions", len(keys))

    def _transact(self, body: Callable[[Any], None]) -> None:
        """Run ``body`` and write unsaved uses in one transaction; nothing stays if it raises."""
        with self.generation.env.begin(write=True) as txn:
            for key in self._unsaved_uses:
                put_entry(self.generation, txn, key, self._record_ids[key], self.catalog[key])
            body(txn)
        self._unsaved_uses.clear()
        self.generation.cover_used_pages()
