"""RAM and tiers: what a put costs the caller, what is dropped, what is promoted, what it says."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.memory import MemoryStore, frozen_copy
from rakv_cluster.store.null import NullStore
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.store.worker_thread import WorkerThread
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.faulty_store import Fault, FaultyStore
from rakv_cluster.testing.records import load_item, tiny_record
from rakv_cluster.types import Tier

RECORD_BYTES = tiny_record(0).kv.nbytes
WAIT_S = 30.0


class SlowDisk(MemoryStore):
    """A disk whose writes wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__(1 << 20, ManualClock())
        self.entered = threading.Event()
        self.released = threading.Event()

    def put(self, records):
        self.entered.set()
        assert self.released.wait(WAIT_S)
        return super().put(records)


def memory(budget: int = 1 << 20) -> MemoryStore:
    return MemoryStore(budget, ManualClock())


def test_a_put_does_not_wait_for_the_disk_and_is_dropped_when_too_much_waits():
    disk = SlowDisk()
    store = TieredStore(memory(), disk, queue_bytes=3 * RECORD_BYTES)
    records = [tiny_record(number) for number in range(5)]

    taken = [store.put([record]) for record in records]

    assert taken == [1] * 5
    assert store.stats().counters["dropped_writes"] == 2
    disk.released.set()
    assert store.flush(WAIT_S)
    assert set(disk.find([r.key for r in records])) == {r.key for r in records[:3]}
    assert store.put([records[4]]) == 1
    assert store.flush(WAIT_S)
    assert store.stats().counters["background_writes"] == 4
    store.close()


def test_writes_that_the_disk_raises_on_are_counted_and_cost_no_others():
    faults = iter([Fault.RAISE, Fault.NONE])
    store = TieredStore(
        memory(), FaultyStore(memory(), lambda: next(faults)), queue_bytes=2 * RECORD_BYTES
    )

    for first in (0, 2):
        assert store.put([tiny_record(first), tiny_record(first + 1)]) == 2
        assert store.flush(WAIT_S)

    counters = store.stats().counters
    assert (counters["failed_writes"], counters["background_writes"]) == (2, 2)
    assert counters["dropped_writes"] == 0
    store.close()


def test_a_queued_write_does_not_bring_back_what_was_deleted():
    disk = SlowDisk()
    store = TieredStore(memory(), disk)
    record = tiny_record(1)
    store.put([record])
    assert disk.entered.wait(WAIT_S)
    deleting = threading.Thread(target=store.delete, args=([record.key],))
    deleting.start()

    disk.released.set()
    deleting.join(WAIT_S)

    assert store.find([record.key]) == {}
    store.close()


def test_what_disk_loads_is_promoted_with_all_that_is_known_of_it():
    ram, disk = memory(), memory()
    record = replace(tiny_record(1), start=77, cost_ms=5.0, created_s=9.0)
    disk.put([record])
    store = TieredStore(ram, disk)

    first, second = (store.load([load_item(record)])[0] for _ in range(2))

    assert first.ok
    assert second == replace(first, tier=Tier.RAM)
    assert replace(ram.find([record.key])[record.key], tier=Tier.DISK) == replace(
        disk.find([record.key])[record.key], tier=Tier.DISK
    )
    assert store.stats().counters["promotions"] == 1
    store.close()


def test_part_of_a_tail_is_not_promoted():
    ram, disk = memory(), memory()
    record = tiny_record(1)
    disk.put([record])
    store = TieredStore(ram, disk)
    item = replace(load_item(record), token_ids=record.token_ids[:5])
    item = replace(item, out=item.out[:, :, :, :5])

    (loaded,) = store.load([item])

    assert loaded.ok
    assert ram.find([record.key]) == {}
    store.close()


class ReplacedDisk(MemoryStore):
    """A disk on which another record takes a key's place as soon as the first was loaded."""

    def __init__(self, replacement: ChunkRecord) -> None:
        super().__init__(1 << 20, ManualClock())
        self._replacement = replacement

    def load(self, items):
        outcomes = super().load(items)
        self.put([self._replacement])
        return outcomes


def test_what_was_loaded_is_not_promoted_as_another_classs_record():
    theirs = replace(tiny_record(1), numeric_class="theirs")
    ours = replace(theirs, numeric_class="ours", kv=np.bitwise_not(theirs.kv))
    ram, disk = memory(), ReplacedDisk(ours)
    disk.put([theirs])
    store = TieredStore(ram, disk)

    (loaded,) = store.load([replace(load_item(theirs), numeric_class="theirs")])

    assert loaded.ok
    assert not ram.load([replace(load_item(theirs), numeric_class="ours")])[0].ok
    store.close()


def test_memory_keeps_no_part_of_the_callers_buffer():
    record = tiny_record(1)
    store = memory()
    item = load_item(record)
    store.put([record])
    expected = record.kv.copy()

    record.kv.fill(0)
    store.load([item])

    np.testing.assert_array_equal(item.out, expected)


def test_memory_shares_what_nobody_can_change():
    frozen = frozen_copy(tiny_record(1))

    assert frozen_copy(frozen) is frozen
    assert frozen_copy(replace(frozen, kv=frozen.kv[:])) is not frozen
    with pytest.raises(ValueError, match="read-only"):
        frozen.kv[...] = 0


def test_memory_evicts_the_last_chunk_of_a_prompt_first():
    store = memory(4 * RECORD_BYTES)
    chunks = [replace(tiny_record(number), start=8 * number) for number in range(4)]
    store.put(chunks)

    store.put([replace(tiny_record(9), start=0)])

    assert set(store.find([c.key for c in chunks])) == {c.key for c in chunks[:3]}
    assert store.stats().counters["ram_evictions"] == 1


def test_a_record_larger_than_memory_is_refused():
    store = memory(RECORD_BYTES - 1)

    assert store.put([tiny_record(1)]) == 0
    assert store.stats().counters["ram_refused"] == 1


def test_a_record_of_another_numeric_class_replaces_the_stored_one():
    store = memory()
    store.put([tiny_record(1)])

    store.put([replace(tiny_record(1), numeric_class="other")])

    assert store.find([tiny_record(1).key])[tiny_record(1).key].numeric_class == "other"


def test_counters_count_what_happened():
    store = memory()
    store.put([tiny_record(1), tiny_record(2)])
    store.put([tiny_record(1)])
    store.load([load_item(tiny_record(number)) for number in range(4)])

    counters = store.stats().counters
    assert (counters["ram_puts"], counters["ram_hits"], counters["ram_misses"]) == (2, 2, 2)


def test_the_null_store_takes_and_finds_nothing():
    store = NullStore()
    record = tiny_record(1)

    assert store.put([record]) == store.delete([record.key]) == 0
    assert store.find([record.key]) == {}
    assert not store.load([load_item(record)])[0].ok
    assert store.stats().records == 0
    store.close()


def test_a_worker_thread_runs_jobs_in_order_and_survives_a_failing_one(caplog):
    seen = []
    thread = WorkerThread("test", queue_limit=10)

    assert thread.post(lambda: seen.append(1))
    assert thread.post(lambda: seen.append(1 // 0))
    assert thread.run(lambda: seen.append(2)) is None
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)

    assert seen == [1, 2]
    assert "background job failed" in caplog.text
    thread.close()
    thread.close()
    assert not thread.post(lambda: None)


def test_a_worker_thread_bounds_its_queue_and_finishes_it_at_the_end():
    started, gate, seen = threading.Event(), threading.Event(), []
    thread = WorkerThread("test", queue_limit=2)

    def block():
        started.set()
        gate.wait(WAIT_S)

    thread.post(block)
    assert started.wait(WAIT_S)
    accepted = [thread.post(lambda n=n: seen.append(n)) for n in range(4)]
    gate.set()
    thread.close()

    assert accepted == [True, True, False, False]
    assert seen == [0, 1]


def test_a_worker_thread_has_an_idle_job():
    idle = threading.Event()
    thread = WorkerThread("test", queue_limit=2, on_idle=idle.set, idle_s=0.01)

    assert idle.wait(WAIT_S)
    thread.close()
