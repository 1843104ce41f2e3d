"""Reads from other nodes against a dict, while shards are gone, late, raise or answer garbage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rakv_cluster.cluster.breaker import BreakerLimits
from rakv_cluster.cluster.peers import Peers
from rakv_cluster.cluster.placement import Placement
from rakv_cluster.cluster.remote import RemoteShards
from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.kv.codec import EncodedRecord, encode
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.records import load_item, tiny_record
from rakv_cluster.testing.simulated_shards import Fault, SimulatedShards
from rakv_cluster.types import Tier

HERE = "n0"
NODES = [HERE, "n1", "n2", "n3"]
RECORDS = [tiny_record(number) for number in range(10)]
ENCODED = {record.key: encode(record) for record in RECORDS}
LIMITS = ClientLimits(
    lookup_timeout_s=0.25,
    load_timeout_s=2.0,
    batch_bytes=2000,  # of records of about 800 bytes: several waves
    batch_keys=4,
    remembered_routes=6,
    breaker=BreakerLimits(failures=3, cooldown_s=1.0, max_cooldown_s=4.0),
)
nodes = st.sampled_from(NODES)
some = st.lists(st.sampled_from(RECORDS), unique_by=lambda record: record.key)


class RemoteMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.cluster = SimulatedShards(NODES, self.clock, np.random.default_rng(0))
        self.peers = Peers(self.cluster, LIMITS.breaker, self.clock)
        self.kept: list[EncodedRecord] = []
        self.remote = RemoteShards(HERE, self.peers, LIMITS, self.clock, self.kept.extend)
        self.remote.set_nodes(NODES)
        self.hits = self.misses = self.found = 0

    @rule(node=nodes, records=some)
    def store(self, node: str, records: list) -> None:
        for record in records:
            self.cluster.hold(node, ENCODED[record.key])

    @rule(node=nodes, records=some)
    def evict(self, node: str, records: list) -> None:
        for record in records:
            self.cluster.records[node].pop(record.key, None)

    @rule(node=nodes, fault=st.sampled_from(Fault))
    def break_or_heal(self, node: str, fault: Fault) -> None:
        self.cluster.faults[node] = fault

    @rule(record=st.sampled_from(RECORDS), node=nodes)
    def directory_lies(self, record, node: str) -> None:
        self.cluster.lies[record.key] = node

    @rule(members=st.sets(nodes))
    def members_change(self, members: set[str]) -> None:
        self.remote.set_nodes(members)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(records=some)
    def find(self, records: list) -> None:
        before_s = self.clock.monotonic_s()
        found = self.remote.find([record.key for record in records])
        assert self.clock.monotonic_s() - before_s <= LIMITS.lookup_timeout_s + 1e-6
        self.found += len(found)
        for record in records:
            holders = {n for n in NODES if record.key in self.cluster.records[n]}
            if record.key in found:
                assert found[record.key].tier is Tier.REMOTE
                assert holders - {HERE}
                assert found[record.key].token_ids == record.token_ids

    @rule(records=some)
    def load(self, records: list) -> None:
        self.kept.clear()
        items = [load_item(record) for record in records]
        before_s = self.clock.monotonic_s()
        outcomes = self.remote.load(items)
        assert self.clock.monotonic_s() - before_s <= LIMITS.load_timeout_s + 1e-6
        for record, item, loaded in zip(records, items, outcomes, strict=True):
            if loaded.ok:
                assert np.array_equal(item.out, record.kv)
        hits = sum(loaded.ok for loaded in outcomes)
        self.hits += hits
        self.misses += len(items) - hits
        assert [record.key for record in self.kept] == [
            item.key for item, loaded in zip(items, outcomes, strict=True) if loaded.ok
        ]
        assert all(ENCODED[record.key] == record for record in self.kept)

    @rule()
    def settle(self) -> None:
        """Without faults everything another node holds is found and loaded."""
        self.cluster.lies.clear()
        for node in NODES:
            self.cluster.faults[node] = Fault.NONE
        self.remote.set_nodes(NODES)
        self.clock.advance(LIMITS.breaker.max_cooldown_s)
        for _ in range(3):  # probes close breakers; routes that led nowhere are forgotten
            found = self.remote.find([record.key for record in RECORDS])
            self.found += len(found)
        there = {key for node in NODES if node != HERE for key in self.cluster.records[node]}
        assert set(found) == there
        self.load([record for record in RECORDS if record.key in list(found)[-4:]])

    def teardown(self) -> None:
        self.settle()

    @invariant()
    def counters_tell_the_truth(self) -> None:
        counters = self.remote.counters()
        assert counters["remote_hits"] == self.hits
        assert counters["remote_misses"] == self.misses
        assert counters["remote_found"] == self.found

    @invariant()
    def calls_are_bounded(self) -> None:
        for call in self.cluster.calls:
            assert len(call.args[0]) <= LIMITS.batch_keys
        self.cluster.calls.clear()


TestRemote = RemoteMachine.TestCase
TestRemote.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def client(
    faults: dict[str, Fault], limits: ClientLimits = LIMITS
) -> tuple[RemoteShards, SimulatedShards, ManualClock]:
    clock = ManualClock()
    cluster = SimulatedShards(NODES, clock, np.random.default_rng(0))
    cluster.faults |= faults
    remote = RemoteShards(
        HERE, Peers(cluster, limits.breaker, clock), limits, clock, lambda records: None
    )
    remote.set_nodes(NODES)
    return remote, cluster, clock


def test_a_stalled_shard_costs_a_few_deadlines_and_then_almost_nothing() -> None:
    remote, _, clock = client({"n1": Fault.LATE})
    before_s = clock.monotonic_s()
    for _ in range(200):
        remote.find([record.key for record in RECORDS])
    # Three deadlines open the breaker; its probes are a second and more apart, and time only
    # passes here while a call waits.
    assert clock.monotonic_s() - before_s == (LIMITS.breaker.failures * LIMITS.lookup_timeout_s / 2)


@pytest.mark.parametrize("fault", [Fault.GONE, Fault.RAISES, Fault.GARBAGE, Fault.LATE])
def test_one_broken_shard_takes_only_its_own_keys_with_it(fault: Fault) -> None:
    limits = dataclasses.replace(LIMITS, remembered_routes=100)
    remote, cluster, _ = client({"n3": fault}, limits)
    for record in RECORDS:
        cluster.hold("n2", ENCODED[record.key])
    owners = Placement(NODES)
    wanted = [record for record in RECORDS if owners.owner(record.key) != "n3"]
    found = remote.find([record.key for record in RECORDS])
    assert set(found) == {record.key for record in wanted}
    assert all(loaded.ok for loaded in remote.load([load_item(record) for record in wanted]))


def test_a_shard_that_is_late_once_is_not_asked_for_the_rest_of_a_load() -> None:
    remote, cluster, clock = client({}, dataclasses.replace(LIMITS, remembered_routes=100))
    for record in RECORDS:
        cluster.hold("n1", ENCODED[record.key])
    remote.find([record.key for record in RECORDS])
    cluster.faults["n1"] = Fault.LATE
    cluster.calls.clear()
    before_s = clock.monotonic_s()
    assert not any(loaded.ok for loaded in remote.load([load_item(r) for r in RECORDS]))
    assert clock.monotonic_s() - before_s == LIMITS.load_timeout_s
    assert len(cluster.calls) == 1


def test_a_single_node_asks_nobody() -> None:
    remote, cluster, _ = client({})
    remote.set_nodes([HERE])
    assert remote.find([record.key for record in RECORDS]) == {}
    assert cluster.calls == []


def test_other_token_ids_or_layout_under_a_key_are_a_miss() -> None:
    remote, cluster, _ = client({})
    cluster.hold("n1", ENCODED[RECORDS[0].key])
    remote.find([RECORDS[0].key])
    item = load_item(RECORDS[0])
    other = type(item)(item.key, (*item.token_ids[:-1], 999), item.layout, item.out)
    assert [loaded.ok for loaded in remote.load([other, item])] == [False, True]
