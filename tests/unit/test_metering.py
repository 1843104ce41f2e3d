"""What a request's loads took, finished or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.reuse.metering import LoadTiming, MeteredStore
from rakv_cluster.store.base import Loaded, LoadItem
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.types import Tier

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")
KEYS = [bytes([index]) * 32 for index in range(2)]
TOKENS = (1, 2, 3)


class Slow(MemoryStore):
    """Does something in the middle of each load."""

    def __init__(self, clock: ManualClock, during: Callable[[], None]) -> None:
        super().__init__(1 << 20, clock)
        self._during = during

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        self._during()
        return super().load(items)


def items(keys: Sequence[bytes]) -> list[LoadItem]:
    out = np.zeros(LAYOUT.shape(len(TOKENS)), dtype=np.uint32)
    return [LoadItem(key, TOKENS, LAYOUT, out) for key in keys]


def metered(clock: ManualClock, during: Callable[[], None]) -> MeteredStore:
    store = Slow(clock, during)
    kv = np.zeros(LAYOUT.shape(len(TOKENS)), dtype=np.uint32)
    for key in KEYS:
        store.put([ChunkRecord(key, bytes(32), TOKENS, 0, LAYOUT, kv, 1.0, "c", 0.0)])
    return MeteredStore(store, clock)


def test_a_finished_load_has_its_bytes_and_its_time() -> None:
    clock = ManualClock()
    store = metered(clock, lambda: clock.advance(0.5))
    found = store.find(KEYS)

    store.load(items(KEYS))

    size = sum(each.stored_bytes for each in found.values())
    assert store.timings() == (LoadTiming(Tier.RAM, size, pytest.approx(500.0)),)
    assert store.unfinished() == ()


def test_the_one_under_way_has_taken_so_long_already() -> None:
    clock = ManualClock()
    seen: list[tuple[LoadTiming, ...]] = []

    def during() -> None:
        clock.advance(2.0)
        seen.append(store.unfinished())

    store = metered(clock, during)
    found = store.find(KEYS[:1])
    store.load(items(KEYS[:1]))

    assert seen == [(LoadTiming(Tier.RAM, found[KEYS[0]].stored_bytes, pytest.approx(2_000.0)),)]


def test_what_nobody_looked_for_is_not_noted() -> None:
    clock = ManualClock()
    store = metered(clock, lambda: clock.advance(0.5))

    store.load(items(KEYS))

    assert store.timings() == ()


def test_a_load_that_fails_teaches_nothing_and_is_over() -> None:
    clock = ManualClock()

    def fail() -> None:
        raise StoreUnavailable("as the test asked")

    store = metered(clock, fail)
    store.find(KEYS)
    with pytest.raises(StoreUnavailable):
        store.load(items(KEYS))

    assert store.timings() == ()
    assert store.unfinished() == ()
