"""The operator's view: every node's own word, and who did not give one."""

from __future__ import annotations

import numpy as np
import pytest

from rakv_cluster.cluster.admin import Drained, StoreAdmin
from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.codec import encode
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.records import TINY_NAMESPACE, tiny_record
from rakv_cluster.testing.simulated_shards import Fault, SimulatedShards

NODES = ["n0", "n1", "n2"]
RECORDS = [tiny_record(number) for number in range(10)]
KEYS = [record.key for record in RECORDS]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cluster(clock: ManualClock) -> SimulatedShards:
    """Record ``i`` on node ``i % 3``, and record 0 on every node."""
    cluster = SimulatedShards(NODES, clock, np.random.default_rng(0))
    for number, record in enumerate(RECORDS):
        cluster.hold(NODES[number % 3], encode(record))
    for node in NODES:
        cluster.hold(node, encode(RECORDS[0]))
    return cluster


def admin(cluster: SimulatedShards) -> StoreAdmin:
    return StoreAdmin(cluster, lambda: NODES, ManualClock(), batch_keys=4)


def test_lookup_tells_who_holds_what(cluster: SimulatedShards) -> None:
    answers = admin(cluster).lookup(KEYS)
    assert {node: set(found) for node, found in answers.items()} == {
        "n0": set(KEYS[0::3]),
        "n1": {KEYS[0], *KEYS[1::3]},
        "n2": {KEYS[0], *KEYS[2::3]},
    }


def test_keys_travel_in_bounded_batches(cluster: SimulatedShards) -> None:
    admin(cluster).lookup(KEYS)
    assert sorted(len(call.args[0]) for call in cluster.calls) == [2] * 3 + [4] * 6


def test_evicted_records_are_gone_everywhere(cluster: SimulatedShards) -> None:
    removed = admin(cluster).evict(KEYS[:4])
    assert removed == {"n0": [KEYS[0], KEYS[3]], "n1": KEYS[:2], "n2": [KEYS[0], KEYS[2]]}
    assert not any(set(held) & set(KEYS[:4]) for held in cluster.records.values())


def test_clear_removes_a_namespace_and_nothing_else(cluster: SimulatedShards) -> None:
    assert admin(cluster).clear(b"another".ljust(32)) == dict.fromkeys(NODES, 0)
    assert admin(cluster).clear(TINY_NAMESPACE) == {"n0": 4, "n1": 4, "n2": 4}
    assert cluster.records == {node: {} for node in NODES}


def test_a_pin_is_held_where_the_record_is_until_its_owner_ends_it(
    cluster: SimulatedShards,
) -> None:
    store = admin(cluster)
    assert store.pin(KEYS[:2], "me", 60.0) == {"n0": KEYS[:1], "n1": KEYS[:2], "n2": KEYS[:1]}
    assert store.unpin(KEYS, "another") == dict.fromkeys(NODES, 0)
    assert store.unpin(KEYS, "me") == {"n0": 1, "n1": 2, "n2": 1}


def test_warm_copies_to_the_nodes_named_only(cluster: SimulatedShards) -> None:
    assert {k: set(v) for k, v in admin(cluster).warm(KEYS, ["n2"]).items()} == {"n2": set(KEYS)}
    assert set(cluster.records["n2"]) == set(KEYS)
    assert len(cluster.records["n1"]) == 4


def test_a_drained_node_leaves_what_it_alone_had_to_the_others(cluster: SimulatedShards) -> None:
    drained = admin(cluster).drain("n0", limit_bytes=1 << 20, deadline_s=10.0)

    assert drained == Drained(copied=3, left=0, elsewhere=1)
    del cluster.records["n0"]
    assert {key for held in cluster.records.values() for key in held} == set(KEYS)
    copies = [key for held in cluster.records.values() for key in held]
    assert len(copies) == len(KEYS) + 1  # record 0 was on both before


def test_a_drain_is_bounded_by_bytes_and_takes_the_hottest(cluster: SimulatedShards) -> None:
    size = cluster.records["n0"][KEYS[9]].nbytes

    drained = admin(cluster).drain("n0", limit_bytes=2 * size, deadline_s=10.0)

    assert drained == Drained(copied=2, left=0, elsewhere=0)
    kept = {**cluster.records["n1"], **cluster.records["n2"]}
    assert [number for number in (3, 6, 9) if KEYS[number] in kept] == [6, 9]  # held last


def test_a_drain_ends_with_its_time_and_says_what_is_left(
    cluster: SimulatedShards, clock: ManualClock
) -> None:
    for node in ("n1", "n2"):
        cluster.faults[node] = Fault.LATE
    began_s = clock.monotonic_s()

    drained = StoreAdmin(cluster, lambda: NODES, clock, timeout_s=5.0).drain(
        "n0", limit_bytes=1 << 20, deadline_s=8.0
    )

    assert drained == Drained(copied=0, left=4, elsewhere=0)
    assert clock.monotonic_s() - began_s == 8.0


def test_a_node_that_does_not_answer_cannot_be_drained(cluster: SimulatedShards) -> None:
    cluster.faults["n0"] = Fault.GONE
    with pytest.raises(StoreUnavailable, match="n0"):
        admin(cluster).drain("n0", limit_bytes=1 << 20, deadline_s=8.0)


def test_a_node_that_does_not_answer_is_missing_and_is_asked_again_next_time(
    cluster: SimulatedShards,
) -> None:
    store = admin(cluster)
    cluster.faults["n1"] = Fault.LATE
    for _ in range(10):
        assert set(store.stats()) == {"n0", "n2"}
        assert set(store.lookup(KEYS)) == {"n0", "n2"}
    cluster.faults["n1"] = Fault.NONE
    assert set(store.stats()) == set(NODES)
