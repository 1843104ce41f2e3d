"""The faulty store keeps its own contract, or tests that use it would prove nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.faulty_store import Fault, FaultyStore, seeded_faults
from rakv_cluster.testing.records import load_item, tiny_record


def store_with(fault: Fault, clock: ManualClock | None = None) -> tuple[FaultyStore, MemoryStore]:
    clock = clock or ManualClock()
    inner = MemoryStore(1 << 20, clock)
    inner.put([tiny_record(number) for number in range(4)])
    return FaultyStore(inner, lambda: fault, lambda: clock.advance(30.0)), inner


@given(st.integers(0, 1000))
def test_no_fault_delivers_other_bytes_as_good_ones(seed):
    _, inner = store_with(Fault.NONE)
    store = FaultyStore(inner, seeded_faults(seed, dict.fromkeys(Fault, 1.0)))
    records = [tiny_record(number) for number in range(6)]

    for _ in range(5):
        items = [load_item(record) for record in records]
        try:
            outcomes = store.load(items)
        except StoreUnavailable:
            continue
        for record, item, loaded in zip(records, items, outcomes, strict=False):
            if loaded.ok:
                np.testing.assert_array_equal(item.out, record.kv)


def test_equal_seeds_draw_equal_faults():
    weights = {Fault.NONE: 3.0, Fault.RAISE: 1.0, Fault.FULL: 1.0}
    one, other, third = (seeded_faults(seed, weights) for seed in (1, 1, 2))
    draws = [one() for _ in range(50)]

    assert draws == [other() for _ in range(50)]
    assert draws != [third() for _ in range(50)]
    assert set(draws) == set(weights)


def test_each_fault_does_what_it_says():
    record, fresh = tiny_record(1), tiny_record(9)
    keys = [record.key]

    with pytest.raises(StoreUnavailable):
        store_with(Fault.RAISE)[0].find(keys)
    assert store_with(Fault.FORGET)[0].find(keys) == {}
    assert not store_with(Fault.FORGET)[0].load([load_item(record)])[0].ok
    for fault, taken in ((Fault.FORGET, 0), (Fault.FULL, 0), (Fault.LIE, 1)):
        store, inner = store_with(fault)
        assert store.put([fresh]) == taken
        assert inner.find([fresh.key]) == {}
    assert set(store_with(Fault.FULL)[0].find(keys)) == set(keys)
    assert store_with(Fault.LIE)[0].find(keys)[record.key].token_ids != record.token_ids


def test_a_late_call_waits_and_then_works():
    clock = ManualClock()
    store, _ = store_with(Fault.DELAY, clock)
    before_s = clock.monotonic_s()

    (loaded,) = store.load([load_item(tiny_record(1))])

    assert loaded.ok
    assert clock.monotonic_s() - before_s == 30.0
