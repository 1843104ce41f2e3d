"""Finding KV by content: the same answers from RAM, from disk, and after records have left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rakv_cluster.chunking.keys import content_key
from rakv_cluster.clock import SystemClock
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.donors import Donor, best_donor
from rakv_cluster.store.lmdb_shard import LmdbStore
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.shard_writer import ShardSettings, ShardWriter
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.testing.records import tiny_record

BUDGET = 64 << 20


@pytest.fixture(params=["memory", "lmdb", "tiered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    clock = SystemClock()
    kept: ChunkStore = MemoryStore(BUDGET, clock)
    if request.param != "memory":
        kept = LmdbStore(ShardWriter(tmp_path, ShardSettings(budget_bytes=BUDGET), clock))
    if request.param == "tiered":
        kept = TieredStore(MemoryStore(1, clock), kept)
    yield kept
    kept.close()


def put(store: ChunkStore, *records: ChunkRecord) -> None:
    store.put(records)
    if isinstance(store, TieredStore):
        assert store.flush(10.0)


def variant(number: int, start: int) -> ChunkRecord:
    """Record 0's tokens behind another prefix."""
    return replace(tiny_record(0), key=bytes([number]) * 32, start=start)


def content() -> bytes:
    record = tiny_record(0)
    return content_key(record.namespace, record.token_ids)


def test_a_record_is_found_by_its_content(store: ChunkStore) -> None:
    put(store, variant(1, 400), replace(tiny_record(1), start=64))

    assert store.donors([content(), bytes(32)]) == {content(): bytes([1]) * 32}


def test_what_stands_at_the_start_lends_nothing(store: ChunkStore) -> None:
    put(store, variant(1, 0))

    assert store.donors([content()]) == {}


def test_a_record_behind_more_context_is_preferred_else_the_first(store: ChunkStore) -> None:
    put(store, variant(1, 40))
    put(store, variant(2, 90))
    first = store.donors([content()])
    put(store, variant(3, 600))
    put(store, variant(4, 700))

    assert first == {content(): bytes([1]) * 32}
    assert store.donors([content()]) == {content(): bytes([3]) * 32}


def test_a_record_that_left_lends_nothing(store: ChunkStore) -> None:
    put(store, variant(1, 400))
    put(store, variant(2, 500))

    store.delete([bytes([1]) * 32])
    left = store.donors([content()])
    store.delete([bytes([2]) * 32])

    assert left == {content(): bytes([2]) * 32}
    assert store.donors([content()]) == {}


def test_other_namespaces_share_nothing(store: ChunkStore) -> None:
    put(store, replace(variant(1, 400), namespace=bytes([9]) * 32))

    assert store.donors([content()]) == {}


def test_memory_forgets_what_it_evicts() -> None:
    record = variant(1, 400)
    memory = MemoryStore(record.kv.nbytes, SystemClock())
    memory.put([record])

    memory.put([replace(tiny_record(0), key=bytes([7]) * 32, token_ids=tiny_record(1).token_ids)])

    assert memory.stats().counters["ram_evictions"] == 1
    assert memory.donors([content()]) == {}


def test_donors_outlive_the_process(tmp_path: Path) -> None:
    settings = ShardSettings(budget_bytes=BUDGET)
    store = LmdbStore(ShardWriter(tmp_path, settings, SystemClock()))
    store.put([variant(1, 400)])
    store.close()

    again = LmdbStore(ShardWriter(tmp_path, settings, SystemClock()))
    try:
        assert again.donors([content()]) == {content(): bytes([1]) * 32}
    finally:
        again.close()


def test_no_donor_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no donor"):
        best_donor([])
    assert best_donor([Donor(b"a", 1), Donor(b"b", 299)]).key == b"a"
