"""RAM in front of disk against a dict: what comes back is what went in, and nothing gets lost."""

from __future__ import annotations

import tempfile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import LoadItem
from rakv_cluster.store.lmdb_shard import LmdbStore, ShardSettings, ShardWriter
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import TINY_LAYOUT, tiny_record
from rakv_cluster.types import Tier

RAM_BYTES = 20_000  # a few of the records below
numbers = st.integers(0, 12)
sizes = st.integers(1, 60)


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.known: dict[bytes, ChunkRecord] = {}
        self.hits = self.misses = 0
        self.open()

    def open(self) -> None:
        limits = ShardSettings(budget_bytes=64 << 20)
        self.memory = MemoryStore(RAM_BYTES, self.clock)
        self.disk = LmdbStore(ShardWriter(self.folder.name, limits, self.clock))
        self.store = TieredStore(self.memory, self.disk)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(batch=st.lists(st.tuples(numbers, sizes), min_size=1, max_size=4))
    def put(self, batch: list[tuple[int, int]]) -> None:
        records = [tiny_record(number, tokens) for number, tokens in batch]
        scratch = [record.kv.copy() for record in records]

        taken = self.store.put(records)

        assert taken == len(records)
        for record, kv in zip(records, scratch, strict=True):
            record.kv.fill(0)  # a store must not depend on the caller's buffer
            kept = self.known.get(record.key)
            if kept is None or len(kept.token_ids) < len(record.token_ids):
                number = record.token_ids[0]
                self.known[record.key] = tiny_record(number, len(record.token_ids))
                np.testing.assert_array_equal(self.known[record.key].kv, kv)
        assert self.store.flush(timeout_s=30.0)

    @rule(number=numbers, tokens=sizes)
    def load(self, number: int, tokens: int) -> None:
        wanted = tiny_record(number, tokens)
        out = np.zeros(TINY_LAYOUT.shape(tokens + 5), np.uint32)[:, :, :, 2 : 2 + tokens]
        kept = self.known.get(wanted.key)

        (loaded,) = self.store.load([LoadItem(wanted.key, wanted.token_ids, TINY_LAYOUT, out)])

        assert loaded.ok == (kept is not None and len(kept.token_ids) >= tokens)
        if loaded.ok:
            np.testing.assert_array_equal(out, kept.kv[:, :, :, :tokens])

    @rule(number=numbers, tokens=sizes, strange=st.integers(1000, 2000))
    def other_tokens_are_a_miss(self, number: int, tokens: int, strange: int) -> None:
        wanted = tiny_record(number, tokens)
        ids = (*wanted.token_ids[:-1], strange)

        (loaded,) = self.store.load([LoadItem(wanted.key, ids, TINY_LAYOUT, wanted.kv)])

        assert not loaded.ok

    @rule(chosen=st.lists(numbers, max_size=4, unique=True))
    def delete(self, chosen: list[int]) -> None:
        keys = [tiny_record(number).key for number in chosen]

        assert self.store.delete(keys) == sum(key in self.known for key in keys)

        for key in keys:
            self.known.pop(key, None)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def finds_everything_put(self) -> None:
        keys = [tiny_record(number).key for number in range(13)]

        found = self.store.find(keys)

        on_disk = {key: f.token_ids for key, f in self.disk.find(keys).items()}
        assert on_disk == {key: record.token_ids for key, record in self.known.items()}
        assert set(found) == set(self.known)
        in_memory = self.memory.find(keys)
        assert {key for key, f in found.items() if f.tier is Tier.RAM} == set(in_memory)
        for key, f in in_memory.items():
            # RAM may hold less of a tail: the longer one was evicted there, then a shorter put.
            assert f.token_ids == on_disk[key][: len(f.token_ids)]

    @invariant()
    def memory_keeps_its_budget(self) -> None:
        stats = self.memory.stats()
        assert stats.stored_bytes <= RAM_BYTES
        held = self.memory.find(list(self.known)).values()
        assert stats.stored_bytes == sum(f.stored_bytes for f in held)
        assert stats.records == len(held)


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
