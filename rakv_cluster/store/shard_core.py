"""A shard's records and their budget: everything that happens inside a write transaction.

Single-threaded: :class:`~.shard_writer.ShardWriter` runs it on its thread.
"""

from __future__ import annotations

from collections import Counter
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
from rakv_cluster.store.donors import donated_content
from rakv_cluster.store.eviction import Entry
from rakv_cluster.store.generation import (
    Generation,
    charged_bytes,
    delete_pin,
    delete_record,
    get_head,
    put_entry,
    put_pin,
    put_record,
    read_index,
    read_pins,
    tick,
)
from rakv_cluster.store.pins import Pins

CORE_COUNTERS = (
    "disk_puts", "disk_duplicates", "disk_refused_large", "disk_refused_damaged",
    "disk_refused_full", "disk_evictions", "disk_deletes", "disk_expired", "disk_write_retries",
)  # fmt: skip
DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)
"""LMDB errors after which an environment cannot be trusted."""

_EXTRA_EVICTION = 0.05  # of the budget, when the disk or map is full although the budget is not
_RECORD_SHARE = 4  # a record may take a quarter of the budget: one must not push out all others
_PIN_SHARE = 2  # pins may hold half of the budget


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a batch: keys stored anew, keys that left, records not taken.

    Keys leave to make room, or have since the last batch because they were too old.
    """

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
            head.created_s, now_s, content=donated_content(head),
        )  # fmt: skip


class ShardCore:
    """Records of one open generation.

    Methods raise ``lmdb.Error`` when the environment is damaged or the disk fails; nothing has
    changed then.
    """

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
        self._pins = Pins()
        try:
            with generation.env.begin() as txn:
                rows = list(read_index(generation, txn))
                pins = list(read_pins(generation, txn))
        except lmdb.Error as error:
            raise CorruptRecord(f"{generation.path} is damaged: {error}") from error
        # In the order of last use, so that a policy that keeps its own order finds it again.
        for key, record_id, entry in sorted(
            rows, key=lambda row: (row[2].last_use_s, -row[2].start)
        ):
            catalog.add(key, entry)
            self._record_ids[key] = record_id
        for key, owner, until_s in pins:
            if key in catalog:
                self._pins.hold(key, owner, until_s)
        self._next_id = max(self._record_ids.values(), default=0) + 1
        generation.set_ballast()

    def commit(self, batch: Sequence[EncodedRecord]) -> CommitResult:
        """Store a batch, evicting first, in one transaction.

        When disk or map are full although the budget is not, evict more and try once again; then
        refuse.
        """
        incoming, duplicates, refused = self._admit(batch)
        replaced = [item.head.key for item in incoming if item.head.key in self.catalog]
        evicted, incoming, unfit = self._fit(incoming, replaced)
        refused += unfit
        if not incoming:
            return CommitResult(duplicates=duplicates, refused=refused)
        replaced = [key for key in replaced if key in {item.head.key for item in incoming}]
        try:
            self._write(incoming, evicted, replaced)
        except DAMAGE:
            raise
        except lmdb.Error:
            self._counters.add("disk_write_retries")
            gone = self._make_room([*replaced, *evicted])
            # What could not leave before has to leave now: the budget counts on it.
            evicted = [key for key in evicted if key in self.catalog]
            replaced = [key for key in replaced if key in self.catalog]
            try:
                self._write(incoming, evicted, replaced)
            except DAMAGE:
                raise
            except lmdb.Error:
                self._counters.add("disk_refused_full", len(incoming))
                return CommitResult((), tuple(gone), duplicates, refused + len(incoming))
            evicted = [*gone, *evicted]
        self._counters.add("disk_puts", len(incoming))
        stored = tuple(item.head.key for item in incoming)
        left = tuple(key for key in evicted if key not in self.catalog)
        return CommitResult(stored, left, duplicates, refused)

    def delete(self, keys: Iterable[bytes]) -> int:
        """Remove records, pinned or not; returns how many were there."""
        known = [key for key in dict.fromkeys(keys) if key in self.catalog]
        self._remove(known, evicted=False)
        self._counters.add("disk_deletes", len(known))
        return len(known)

    def clear(self, namespace: bytes) -> int:
        """Remove all records of a namespace; returns how many there were."""
        return self.delete(self.catalog.matching(lambda entry: entry.namespace == namespace))

    def expire(self, max_age_s: float) -> list[bytes]:
        """Remove records made more than ``max_age_s`` ago, pinned or not, and pins that ended."""
        now_s = self._clock.wall_s()
        self._release(self._pins.ended(now_s))
        if max_age_s <= 0:
            return []
        old = self.catalog.matching(lambda entry: now_s - entry.created_s > max_age_s)
        self._remove(old, evicted=False)
        self._counters.add("disk_expired", len(old))
        return old

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
        """Evict down to the budget and quota (they may have been lowered); returns what left."""
        present = dict.fromkeys(self.catalog.namespace_bytes(), 0)
        victims = self.catalog.victims(present, spare=self._spared())
        self._remove(victims, evicted=True)
        return victims

    def pin(self, keys: Iterable[bytes], owner: str, ttl_s: float) -> list[bytes]:
        """Keep records from eviction for ``ttl_s``; returns the keys that now are pinned.

        Keys that are not stored, and what would bring all pins above half of the budget, are left
        out.
        """
        until_s = self._clock.wall_s() + ttl_s
        held = self._spared()
        room = self.catalog.budget_bytes // _PIN_SHARE
        room -= sum(self.catalog[key].size_bytes for key in held)
        taken: list[bytes] = []
        for key in dict.fromkeys(keys):
            size = 0 if key in held else self.catalog[key].size_bytes if key in self.catalog else -1
            if 0 <= size <= room:
                room -= size
                taken.append(key)

        def body(txn: Any) -> None:
            for key in taken:
                put_pin(self.generation, txn, key, owner, until_s)

        self._transact(body)
        for key in taken:
            self._pins.hold(key, owner, until_s)
        return taken

    def unpin(self, keys: Iterable[bytes], owner: str) -> int:
        """End an owner's pins; returns how many there were."""
        return self._release([(key, owner) for key in dict.fromkeys(keys)])

    def pinned(self) -> frozenset[bytes]:
        """Keys that cannot be evicted now."""
        return self._spared()

    def _release(self, pins: Sequence[tuple[bytes, str]]) -> int:
        def body(txn: Any) -> None:
            for key, owner in pins:
                delete_pin(self.generation, txn, key, owner)

        if pins:
            self._transact(body)
        return sum(self._pins.release(key, owner) for key, owner in pins)

    def _spared(self) -> frozenset[bytes]:
        return self._pins.held(self._clock.wall_s())

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
            already = incoming.get(head.key)
            if self._has(head) or (already is not None and serves(already.head, head)):
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
        return stored is not None and serves(stored.head, head)

    def _fit(
        self, incoming: list[_Incoming], replaced: Sequence[bytes]
    ) -> tuple[list[bytes], list[_Incoming], int]:
        """Victims that make room, what then fits, and how many records do not.

        Pins and a batch larger than the budget can make room impossible; the last chunks of a
        prompt are left out first, they are worth nothing without the others.
        """
        incoming = sorted(incoming, key=lambda item: item.head.start)
        unfit = 0
        while incoming:
            needed: Counter[bytes] = Counter()
            for item in incoming:
                needed[item.head.namespace] += item.size_bytes
            kept = {item.head.key for item in incoming}
            leaving = [key for key in replaced if key in kept]
            for key in leaving:
                needed[self.catalog[key].namespace] -= self.catalog[key].size_bytes
            spare = self._spared() | set(leaving)
            victims = self.catalog.victims(needed, spare=spare)
            if self.catalog.fits(needed, victims):
                return victims, incoming, unfit
            incoming.pop()
            unfit += 1
            self._counters.add("disk_refused_full")
        return [], [], unfit

    def _write(
        self, incoming: Sequence[_Incoming], evicted: Sequence[bytes], replaced: Sequence[bytes]
    ) -> None:
        now_s = self._clock.wall_s()
        entries = [item.entry(now_s) for item in incoming]
        for item, entry in zip(incoming, entries, strict=True):
            if item.head.key in replaced:
                # A tail that grew is still the record that was used.
                entry.uses = self.catalog[item.head.key].uses

        def body(txn: Any) -> None:
            self._delete_in(txn, evicted)
            self._delete_in(txn, replaced, keep_pins=True)
            for record_id, (item, entry) in enumerate(
                zip(incoming, entries, strict=True), self._next_id
            ):
                put_record(self.generation, txn, record_id, item.record, entry)

        self._transact(body)
        self._forget(evicted, evicted=True)
        self._forget(replaced, evicted=False, keep_pins=True)
        for record_id, item in enumerate(incoming, self._next_id):
            self._record_ids[item.head.key] = record_id
        self._next_id += len(incoming)
        # The last chunk of a prompt becomes the oldest: it is worth nothing without the others.
        for item, entry in reversed(list(zip(incoming, entries, strict=True))):
            self.catalog.add(item.head.key, entry)

    def _make_room(self, leaving: Sequence[bytes]) -> list[bytes]:
        """Evict in a transaction of its own and let its pages become usable; returns what left.

        Pages freed by one transaction can be used by the second one after it, and only once no
        reader (dead ones included) still sees them.
        """
        self.generation.env.reader_check()
        extra_bytes = int(self.catalog.budget_bytes * _EXTRA_EVICTION)
        slack = self.catalog.budget_bytes - self.catalog.used_bytes
        spare = self._spared() | set(leaving)
        more = self.catalog.victims({b"": slack + extra_bytes}, spare=spare)
        gone = [*leaving, *more]
        self.generation.drop_ballast()
        try:
            self._remove(gone, evicted=True)
            for _ in range(2):
                self._transact(lambda txn: tick(self.generation, txn))
        except DAMAGE:
            raise
        except lmdb.Error:
            return [key for key in gone if key not in self.catalog]
        finally:
            self.generation.set_ballast()
        return gone

    def _remove(self, keys: Sequence[bytes], *, evicted: bool) -> None:
        if keys:
            self._transact(lambda txn: self._delete_in(txn, keys))
            self._forget(keys, evicted=evicted)

    def _delete_in(self, txn: Any, keys: Iterable[bytes], *, keep_pins: bool = False) -> None:
        pins = list(self._pins) if not keep_pins and len(self._pins) else []
        gone = set(keys)
        for key in gone:
            delete_record(self.generation, txn, key, self._record_ids[key])
        for key, owner, _ in pins:
            if key in gone:
                delete_pin(self.generation, txn, key, owner)

    def _forget(self, keys: Sequence[bytes], *, evicted: bool, keep_pins: bool = False) -> None:
        for key in keys:
            self.catalog.remove(key, evicted=evicted)
            del self._record_ids[key]
            if not keep_pins:
                self._pins.forget(key)
        self._unsaved_uses.difference_update(keys)
        if evicted:
            self._counters.add("disk_evictions", len(keys))

    def _transact(self, body: Callable[[Any], object]) -> None:
        """Run ``body`` and write unsaved uses in one transaction; nothing stays if it raises."""
        with self.generation.env.begin(write=True) as txn:
            for key in self._unsaved_uses:
                put_entry(self.generation, txn, key, self._record_ids[key], self.catalog[key])
            body(txn)
        self._unsaved_uses.clear()
        self.generation.cover_used_pages()
