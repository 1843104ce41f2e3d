"""NodeStore: local files first, then other nodes, then nothing; every record accounted for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rakv_cluster.cluster.placement import Placement
from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.cluster.store_client import NodeStore
from rakv_cluster.kv.codec import encode
from rakv_cluster.store.lmdb_shard import ShardReader, ShardSettings, ShardWriter, WriterSource
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.records import load_item, tiny_record
from rakv_cluster.testing.simulated_shards import Fault, SimulatedShards

HERE, THERE = "n0", "n1"
RECORDS = [tiny_record(number) for number in range(12)]
KEYS = [record.key for record in RECORDS]
LIMITS = ClientLimits(refresh_s=3600.0, batch_bytes=2000, await_poll_s=0.001)


class Site:
    """One node's store, its real shard on disk, and a simulated neighbour."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.cluster = SimulatedShards([HERE, THERE], self.clock, np.random.default_rng(0))
        self.writer = ShardWriter(folder, ShardSettings(budget_bytes=8 << 20), self.clock)
        self.store = NodeStore(
            HERE,
            self.cluster,
            LIMITS,
            self.clock,
            open_reader=lambda folder: ShardReader(WriterSource(self.writer)),
        )

    def methods_called(self) -> list[str]:
        return [call.method for call in self.cluster.calls]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "shard")
    yield site
    site.store.close()
    site.writer.close()


def test_before_its_shard_answers_everything_is_a_miss(site: Site) -> None:
    site.cluster.faults = dict.fromkeys([HERE, THERE], Fault.GONE)
    assert not site.store.refresh()
    assert site.store.find(KEYS) == {}
    assert not any(loaded.ok for loaded in site.store.load([load_item(RECORDS[0])]))
    assert site.store.put(RECORDS) == 0
    assert site.store.delete(KEYS) == 0
    stats = site.store.stats()
    assert (stats.records, stats.counters["writes_lost"]) == (0, len(RECORDS))


def test_what_this_node_holds_is_read_without_a_call(site: Site) -> None:
    site.writer.commit([encode(record) for record in RECORDS])
    site.store.refresh()
    site.cluster.calls.clear()
    items = [load_item(record) for record in RECORDS]
    assert set(site.store.find(KEYS)) == set(KEYS)
    assert all(loaded.ok for loaded in site.store.load(items))
    assert all(
        np.array_equal(item.out, record.kv) for item, record in zip(items, RECORDS, strict=True)
    )
    assert site.cluster.calls == []


def test_local_remote_and_missing_records_in_one_load_keep_their_order(site: Site) -> None:
    site.writer.commit([encode(record) for record in RECORDS[0::3]])
    for record in RECORDS[1::3]:
        site.cluster.hold(THERE, encode(record))
    site.store.refresh()
    assert set(site.store.find(KEYS)) == set(KEYS[0::3]) | set(KEYS[1::3])
    items = [load_item(record) for record in RECORDS]
    outcomes = site.store.load(items)
    assert [loaded.ok for loaded in outcomes] == [True, True, False] * 4
    for item, record, loaded in zip(items, RECORDS, outcomes, strict=True):
        assert np.array_equal(item.out, record.kv) == loaded.ok


def test_what_came_from_another_node_fills_this_ones_shard(site: Site) -> None:
    for record in RECORDS:
        site.cluster.hold(THERE, encode(record))
    site.store.refresh()
    site.store.find(KEYS)
    site.store.load([load_item(record) for record in RECORDS])
    assert site.store.drain(timeout_s=30.0)
    assert site.cluster.records[HERE] == site.cluster.records[THERE]
    counters = site.store.stats().counters
    assert counters["fills_taken"] == counters["remote_hits"] == len(RECORDS)


def test_a_put_is_sent_in_bounded_batches_and_what_fails_is_counted(site: Site) -> None:
    site.store.refresh()
    assert site.store.put(RECORDS) == len(RECORDS)
    assert site.cluster.records[HERE] == {record.key: encode(record) for record in RECORDS}
    batches = [call.args[0] for call in site.cluster.calls if call.method == "commit"]
    sizes = [sum(record.nbytes for record in batch) for batch in batches]
    assert len(sizes) > 1
    assert max(sizes) <= LIMITS.batch_bytes
    site.cluster.faults[HERE] = Fault.RAISES
    assert site.store.put(RECORDS[:2]) == 0
    counters = site.store.stats().counters
    assert (counters["writes_taken"], counters["writes_lost"]) == (len(RECORDS), 2)


def test_a_record_larger_than_a_batch_still_travels(site: Site) -> None:
    large = tiny_record(99, tokens=64)
    assert encode(large).nbytes > LIMITS.batch_bytes
    site.cluster.hold(THERE, encode(large))
    site.store.refresh()
    assert set(site.store.find([large.key])) == {large.key}
    assert [loaded.ok for loaded in site.store.load([load_item(large)])] == [True]
    assert site.store.put([large]) == 1


def test_used_records_are_reported_in_a_batch_and_only_once(site: Site) -> None:
    site.writer.commit([encode(record) for record in RECORDS])
    site.store.refresh()
    site.store.load([load_item(record) for record in RECORDS[:3]])
    site.store.refresh()
    site.store.refresh()
    reports = [call.args for call in site.cluster.calls if call.method == "report"]
    assert reports == [(tuple(KEYS[:3]), ())]


def test_delete_reaches_every_node_and_counts_keys_once(site: Site) -> None:
    for node in (HERE, THERE):
        for record in RECORDS[:5]:
            site.cluster.hold(node, encode(record))
    site.store.refresh()
    assert site.store.delete(KEYS) == 5
    assert site.cluster.records == {HERE: {}, THERE: {}}


def test_a_claim_excludes_others_until_it_is_released(site: Site) -> None:
    site.store.refresh()
    assert site.store.claim(KEYS, "one", ttl_s=10.0).mine == tuple(KEYS)
    second = site.store.claim(KEYS, "two", ttl_s=10.0)
    assert (second.mine, set(second.theirs)) == ((), set(KEYS))
    site.store.release(KEYS[:4], "one")
    assert site.store.claim(KEYS, "two", ttl_s=10.0).mine == tuple(KEYS[:4])
    site.clock.advance(10.0)
    assert site.store.claim(KEYS, "three", ttl_s=10.0).mine == tuple(KEYS)


def test_keys_of_an_owner_that_does_not_answer_are_the_callers(site: Site) -> None:
    site.store.refresh()
    site.store.claim(KEYS, "one", ttl_s=10.0)
    site.cluster.faults[THERE] = Fault.LATE
    mine = site.store.claim(KEYS, "two", ttl_s=10.0).mine
    assert set(mine) == set(Placement([HERE, THERE]).group(KEYS)[THERE])


def test_a_refresh_has_the_time_of_a_load(site: Site) -> None:
    site.cluster.faults[HERE] = Fault.LATE
    before_s = site.clock.monotonic_s()
    assert not site.store.refresh()
    assert site.clock.monotonic_s() - before_s == LIMITS.load_timeout_s


def test_waiting_ends_when_the_records_are_there(site: Site) -> None:
    site.store.refresh()
    for record in RECORDS:
        site.cluster.hold(THERE, encode(record))
    assert set(site.store.await_records(KEYS, timeout_s=5.0)) == set(KEYS)


def test_waiting_ends_with_its_time(site: Site) -> None:
    site.store.refresh()
    site.cluster.faults[THERE] = Fault.LATE  # every look costs time on the clock
    before_s = site.clock.monotonic_s()
    assert site.store.await_records(KEYS, timeout_s=0.3) == {}
    waited_s = site.clock.monotonic_s() - before_s
    assert 0.3 <= waited_s <= 0.3 + LIMITS.lookup_timeout_s


def test_a_record_that_contradicts_its_layout_is_the_callers_mistake(site: Site) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        site.store.put([dataclasses.replace(RECORDS[0], token_ids=(1,))])
