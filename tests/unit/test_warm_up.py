"""A new replica's RAM is filled with what the service used last, within bytes and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.cluster.store_client import NodeStore
from rakv_cluster.kv.codec import Codec, encode
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.store.warm_up import WarmUpLimits, warm_up
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.records import TINY_LAYOUT, load_item, tiny_record
from rakv_cluster.testing.simulated_shards import Fault, SimulatedShards

OLD, BUSY, NEW = "n0", "n1", "n2"
RECORDS = [tiny_record(number) for number in range(10)]
KEYS = [record.key for record in RECORDS]
LIMITS = WarmUpLimits(budget_bytes=1 << 20, longest_s=2.0, batch_keys=2)


class Site:
    """A node that has just come, with a replica's RAM on it, and two that hold records."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.shards = SimulatedShards([OLD, BUSY, NEW], self.clock, np.random.default_rng(0))
        for number, record in enumerate(RECORDS):
            self.shards.hold((OLD, BUSY)[number % 2], encode(record))
        limits = ClientLimits(refresh_s=3600.0)
        self.nodes = NodeStore(NEW, self.shards, limits, self.clock)
        self.nodes.refresh()
        self.memory = MemoryStore(1 << 20, self.clock)
        self.store = TieredStore(self.memory, self.nodes)

    def warm_up(self, limits: WarmUpLimits = LIMITS) -> int:
        keys = self.nodes.hottest(limits.budget_bytes)
        return warm_up(self.store, keys, TINY_LAYOUT, limits, self.clock)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.store.close()


def test_nodes_take_turns_in_naming_what_they_used_last(site: Site) -> None:
    assert site.nodes.hottest(1 << 20)[:4] == [KEYS[8], KEYS[9], KEYS[6], KEYS[7]]
    site.shards.faults[OLD] = Fault.GONE
    assert site.nodes.hottest(1 << 20) == KEYS[9::-2]


def test_what_was_used_last_is_in_ram_bit_for_bit(site: Site) -> None:
    assert site.warm_up() == sum(record.kv.nbytes for record in RECORDS)

    items = [load_item(record) for record in RECORDS]
    assert all(loaded.ok for loaded in site.memory.load(items))
    for item, record in zip(items, RECORDS, strict=True):
        assert np.array_equal(item.out, record.kv)


def test_no_more_than_the_budget_and_that_of_the_hottest(site: Site) -> None:
    size = RECORDS[0].kv.nbytes
    limits = replace(LIMITS, budget_bytes=3 * size)

    keys = site.nodes.hottest(1 << 20)
    loaded = warm_up(site.store, keys, TINY_LAYOUT, limits, site.clock)

    assert loaded == 3 * size
    assert set(site.memory.find(KEYS)) == set(keys[:3])


def test_slow_disks_end_it(site: Site) -> None:
    keys = site.nodes.hottest(1 << 20)
    site.shards.faults = dict.fromkeys(site.shards.faults, Fault.LATE)
    started_s = site.clock.monotonic_s()

    limits = replace(LIMITS, longest_s=0.01)
    assert warm_up(site.store, keys, TINY_LAYOUT, limits, site.clock) == 0

    calls = [call for call in site.shards.calls if call.method != "info"]
    assert site.clock.monotonic_s() > started_s
    assert len(calls) < len(KEYS)


def test_what_is_gone_lossy_or_of_another_model_is_passed_over(site: Site) -> None:
    gone, lossy = tiny_record(90), tiny_record(91)
    values = np.linspace(0.1, 0.9, lossy.kv.size, dtype=np.float32).reshape(lossy.kv.shape)
    lossy = replace(lossy, kv=values.view(lossy.kv.dtype))
    other = replace(TINY_LAYOUT, layers=3)
    site.shards.hold(BUSY, encode(lossy, Codec.HALF))
    site.shards.hold(BUSY, encode(tiny_record(92, layout=other)))
    keys = [gone.key, lossy.key, tiny_record(92).key, KEYS[0]]

    loaded = warm_up(site.store, keys, TINY_LAYOUT, LIMITS, site.clock)

    assert loaded == RECORDS[0].kv.nbytes
    assert set(site.memory.find([*keys, *KEYS])) == {KEYS[0]}


def test_once_more_loads_nothing(site: Site) -> None:
    site.warm_up()
    assert site.warm_up() == 0
