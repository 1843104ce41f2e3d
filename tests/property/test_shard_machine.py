"""A shard against a dict: random operations with reopening, crashes and compaction in between."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rakv_cluster.kv.codec import encode
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import LoadItem
from rakv_cluster.store.generation import charged_bytes
from rakv_cluster.store.lmdb_shard import ShardReader, ShardSettings, ShardWriter, WriterSource
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import TINY_LAYOUT, tiny_record

BUDGET = 40 * 4096
QUOTA = 25 * 4096
MAX_AGE_S = 1000.0
COUNTED = (
    "disk_puts", "disk_evictions", "disk_duplicates", "disk_deletes", "disk_expired", "disk_hits",
    "disk_misses", "disk_corrupt", "rebuilds",
)  # fmt: skip
"""Counters that the machine keeps as well."""
NAMESPACES = tuple(hashlib.sha256(name).digest() for name in (b"one", b"two"))

numbers = st.integers(0, 30)
batches = st.lists(st.tuples(numbers, st.integers(1, 90)), min_size=1, max_size=6)


def variant(number: int, tokens: int, clock: ManualClock) -> ChunkRecord:
    """A record whose key follows from ``number`` alone: other lengths are other tails."""
    return replace(
        tiny_record(number, tokens),
        namespace=NAMESPACES[number % 2],
        start=number * 10,
        created_s=clock.wall_s(),
    )


class ShardMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.generation = 0
        self.clock = ManualClock()
        self.budget = BUDGET
        self.known: dict[bytes, ChunkRecord] = {}
        self.sizes: dict[bytes, int] = {}
        self.pins: dict[tuple[bytes, str], float] = {}
        self.counted: Counter[str] = Counter()
        self.open()

    @property
    def folder(self) -> Path:
        return self.root / str(self.generation)

    def open(self) -> None:
        limits = ShardSettings(
            self.budget, quota_bytes=QUOTA, max_age_s=MAX_AGE_S, check_interval_s=0.0
        )
        self.writer = ShardWriter(self.folder, limits, self.clock)
        self.reader = ShardReader(WriterSource(self.writer))
        self.counted.clear()

    def teardown(self) -> None:
        self.writer.close()
        shutil.rmtree(self.root)

    def forget(self, keys: list[bytes]) -> None:
        for key in keys:
            del self.known[key], self.sizes[key]
        self.pins = {pin: end for pin, end in self.pins.items() if pin[0] in self.known}

    def held(self) -> set[bytes]:
        return {key for (key, _), end in self.pins.items() if end > self.clock.wall_s()}

    @rule(batch=batches)
    def commit(self, batch: list[tuple[int, int]]) -> None:
        records = [variant(number, tokens, self.clock) for number, tokens in batch]
        held = self.held()

        result = self.writer.commit([encode(record) for record in records])

        assert not set(result.evicted) & held
        assert not set(result.evicted) & set(result.stored)
        self.forget(list(result.evicted))
        for key in result.stored:
            stored = self.reader.find([key])[key]
            match = [r for r in records if r.key == key and r.token_ids == stored.token_ids]
            self.known[key] = match[-1]
            encoded = encode(match[-1])
            self.sizes[key] = charged_bytes(len(encoded.head), len(encoded.body))
        assert len(result.stored) + result.duplicates + result.refused <= len(batch)
        self.counted["disk_puts"] += len(result.stored)
        self.counted["disk_evictions"] += len(result.evicted)
        self.counted["disk_duplicates"] += result.duplicates
        self.counted["refused"] += result.refused

    @rule(chosen=st.lists(numbers, max_size=5))
    def delete(self, chosen: list[int]) -> None:
        keys = [tiny_record(number).key for number in chosen]
        there = [key for key in dict.fromkeys(keys) if key in self.known]

        assert self.writer.delete(keys) == len(there)

        self.forget(there)
        self.counted["disk_deletes"] += len(there)

    @rule(namespace=st.sampled_from(NAMESPACES))
    def clear(self, namespace: bytes) -> None:
        there = [key for key, record in self.known.items() if record.namespace == namespace]

        assert self.writer.clear(namespace) == len(there)

        self.forget(there)
        self.counted["disk_deletes"] += len(there)

    @rule(chosen=st.lists(numbers, max_size=5))
    def touch(self, chosen: list[int]) -> None:
        self.writer.touch([tiny_record(number).key for number in chosen])

    @rule(chosen=st.lists(numbers, max_size=4), owner=st.sampled_from(["a", "b"]))
    def pin(self, chosen: list[int], owner: str) -> None:
        keys = [tiny_record(number).key for number in chosen]

        taken = self.writer.pin(keys, owner, 50.0)

        assert set(taken) <= set(self.known)
        for key in taken:
            self.pins[key, owner] = self.clock.wall_s() + 50.0
        assert sum(self.sizes[key] for key in self.held()) <= max(BUDGET, self.budget) // 2

    @rule(chosen=st.lists(numbers, max_size=4), owner=st.sampled_from(["a", "b"]))
    def unpin(self, chosen: list[int], owner: str) -> None:
        keys = dict.fromkeys(tiny_record(number).key for number in chosen)

        ended = self.writer.unpin(keys, owner)

        assert ended == sum((key, owner) in self.pins for key in keys)
        for key in keys:
            self.pins.pop((key, owner), None)

    @rule(seconds=st.sampled_from([1.0, 20.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-1e6, 100.0, 2000.0]))
    def jump(self, seconds: float) -> None:
        """The wall clock is set; what is too old by it may go, but nothing else changes."""
        self.clock.jump(seconds)

    def expire(self) -> None:
        """Every commit, an empty one too, looks for what is over."""
        left = self.writer.commit([]).evicted
        now_s = self.clock.wall_s()
        old = [key for key, r in self.known.items() if now_s - r.created_s > MAX_AGE_S]
        assert set(left) == set(old)
        self.counted["disk_expired"] += len(old)
        self.forget(old)
        self.pins = {pin: end for pin, end in self.pins.items() if end > now_s}

    @rule()
    def compact(self) -> None:
        copied = self.writer.compact()

        assert (copied.records, copied.damaged) == (len(self.known), 0)
        self.counted["rebuilds"] += 1

    @rule()
    def reopen(self) -> None:
        self.writer.close()
        self.open()

    @rule()
    def crash(self) -> None:
        """What is in the page cache is what a killed process leaves behind."""
        self.generation += 1
        shutil.copytree(self.root / str(self.generation - 1), self.folder)
        self.writer.close()
        self.open()

    @precondition(lambda self: self.known)
    @rule(share=st.sampled_from([0.5, 0.8, 1.0]))
    def change_budget(self, share: float) -> None:
        self.writer.close()
        self.budget = int(BUDGET * share)
        held = self.held()
        self.open()

        left = set(self.writer.keys())
        assert held & set(self.known) <= left
        evicted = [key for key in self.known if key not in left]
        self.forget(evicted)
        self.counted["disk_evictions"] += len(evicted)
        self.counted["rebuilds"] += self.writer.stats().counters["rebuilds"]  # if its map changed

    @rule()
    def sync(self) -> None:
        self.writer.sync()

    @invariant()
    def holds_exactly_what_it_should(self) -> None:
        self.expire()
        assert set(self.writer.keys()) == set(self.known)
        stats = self.writer.stats()
        assert stats.records == len(self.known)
        assert stats.stored_bytes == sum(self.sizes.values())
        assert stats.stored_bytes <= max(
            stats.budget_bytes, sum(self.sizes[k] for k in self.held())
        )
        for namespace in NAMESPACES:
            keys = [key for key, record in self.known.items() if record.namespace == namespace]
            assert sum(self.sizes[key] for key in keys) <= QUOTA
        assert stats.counters["quarantines"] == 0
        assert self.writer.pinned() == self.held()
        counters = stats.counters | self.reader.counters()
        refused = sum(count for name, count in counters.items() if "refused" in name)
        truth = {name: self.counted[name] for name in COUNTED}
        assert {**{name: counters[name] for name in COUNTED}, "refused": refused} == {
            **truth,
            "refused": self.counted["refused"],
        }

    @invariant()
    def returns_the_bits_that_went_in(self) -> None:
        records = list(self.known.values())
        found = self.reader.find([record.key for record in records])
        items = [LoadItem(r.key, r.token_ids, TINY_LAYOUT, np.zeros_like(r.kv)) for r in records]

        outcomes = self.reader.load(items)

        self.counted["disk_hits"] += len(items)
        assert all(outcome.ok for outcome in outcomes)
        for record, item in zip(records, items, strict=True):
            assert found[record.key].token_ids == record.token_ids
            np.testing.assert_array_equal(item.out, record.kv)


TestShardMachine = ShardMachine.TestCase
# Shrinking replays hundreds of shards on a real disk; the steps of a failure are readable as found.
TestShardMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, phases=(Phase.explicit, Phase.generate)
)
