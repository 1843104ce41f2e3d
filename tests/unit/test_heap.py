"""Memory of evicted KV is given back, in portions and without the store's lock."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from rakv_cluster.store.heap import TRIM_BYTES, FreedBytes, trim_heap
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import tiny_record


def test_it_is_given_back_in_portions() -> None:
    trims: list[int] = []
    subject = FreedBytes(lambda: trims.append(1))

    subject.add(TRIM_BYTES - 1)
    subject.give_back()
    assert not trims

    subject.add(1)
    for _ in range(2):
        subject.give_back()
    assert len(trims) == 1


def test_evicted_and_deleted_kv_counts_and_the_lock_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = tiny_record(0).kv.nbytes
    monkeypatch.setattr("rakv_cluster.store.heap.TRIM_BYTES", 2 * size)
    found: list[int] = []

    def trim() -> None:
        found.append(store.stats().records)  # would wait for ever under the store's own lock

    store = MemoryStore(4 * size, ManualClock(), trim=trim)
    store.put([tiny_record(number) for number in range(4)])
    assert found == []

    store.put([tiny_record(number) for number in (4, 5)])
    assert found == [4]

    assert store.delete([tiny_record(4).key, tiny_record(5).key]) == 2
    assert found == [4, 2]


def test_memory_in_use_survives_trimming() -> None:
    held = tiny_record(7).kv

    trim_heap()

    assert np.array_equal(held, tiny_record(7).kv)


@pytest.mark.parametrize(("own", "seen"), [({}, "64 64"), ({"LRU_CACHE_CAPACITY": "7"}, "64 7")])
def test_caches_of_compiled_products_are_bounded_unless_the_user_says_how(
    own: dict[str, str], seen: str
) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = f"import rakv_cluster, os; print(*(os.environ[name] for name in {names}))"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **own},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == seen
