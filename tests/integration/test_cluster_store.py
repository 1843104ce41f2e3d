"""The store on three Ray nodes: what one node computed serves the others, whatever breaks.

Every node has its own folder. An ``Asker`` is a process on a node that uses the store as a worker
would; records are tiny and follow from a number, so that each process can check every byte.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rakv_cluster.clock import SystemClock
from rakv_cluster.cluster.ray_transport import shard_name
from rakv_cluster.cluster.service import (
    open_node_store,
    open_store_admin,
    start_cluster_store,
    stop_cluster_store,
)
from rakv_cluster.cluster.settings import ClientLimits, ClusterStoreSettings, ManagerLimits
from rakv_cluster.cluster.shard_actor import ShardActor
from rakv_cluster.store.lmdb_shard import ShardSettings
from rakv_cluster.testing import waiting
from rakv_cluster.testing.fake_replica import FakeReplica
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.records import TINY_NAMESPACE, load_item, tiny_record

# Workers on the nodes cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.cluster

FAST_FAILURE_DETECTION = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    # A dead raylet refuses the connection at once; a busy machine must not look like one.
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
}
PATIENCE_S = 60.0
# A busy machine must not look like a shard that does not answer: then less would be found, and
# loaded, than there is.
PATIENT = ClientLimits(
    lookup_timeout_s=PATIENCE_S / 2, load_timeout_s=PATIENCE_S / 2, refresh_s=0.2
)
HASTY = dataclasses.replace(PATIENT, lookup_timeout_s=1.0, load_timeout_s=2.0)

eventually = partial(waiting.eventually, timeout_s=2 * PATIENCE_S)


class Asker:
    """A worker's process on a node."""

    def __init__(self, settings: ClusterStoreSettings) -> None:
        self._store = open_node_store(settings, SystemClock())

    def put(self, numbers: Sequence[int]) -> int:
        return self._store.put([tiny_record(number) for number in numbers])

    def find(self, numbers: Sequence[int]) -> list[int]:
        keys = {tiny_record(number).key: number for number in numbers}
        return sorted(keys[key] for key in self._store.find(list(keys)))

    def load(self, numbers: Sequence[int]) -> list[int]:
        """Find and load; the numbers that were served. A wrong byte raises."""
        self.find(numbers)
        records = [tiny_record(number) for number in numbers]
        items = [load_item(record) for record in records]
        served = []
        for number, record, item, loaded in zip(
            numbers, records, items, self._store.load(items), strict=True
        ):
            if loaded.ok:
                assert np.array_equal(item.out, record.kv), f"wrong bytes in record {number}"
                served.append(number)
        return served

    def delete(self, numbers: Sequence[int]) -> int:
        return self._store.delete([tiny_record(number).key for number in numbers])

    def drain(self) -> bool:
        return self._store.drain(PATIENCE_S)

    def refresh(self) -> bool:
        return self._store.refresh()

    def counters(self) -> dict[str, int]:
        return dict(self._store.stats().counters)

    def compute_once(self, number: int, holder: str) -> bool:
        """A cold request: look, claim, look again (the record may have come and ended the lease),
        compute or wait. Whether this one computed."""
        record = tiny_record(number)
        if self._store.find([record.key]):
            return False
        if self._store.claim([record.key], holder, ttl_s=PATIENCE_S).mine:
            if self._store.find([record.key]):
                self._store.release([record.key], holder)
                return False
            threading.Event().wait(0.3)  # the prefill, during which the others arrive
            self._store.put([record])
            return True
        assert self._store.await_records([record.key], PATIENCE_S)
        return False


class GarbageShard:
    """An actor under a shard's name whose every answer is nonsense."""

    def __init__(self, node: str) -> None:
        self._node = node

    def locate(self, keys: Sequence[bytes]) -> object:
        return dict.fromkeys(keys, (self._node,))

    def find(self, keys: Sequence[bytes]) -> object:
        return [keys, None]

    def read(self, keys: Sequence[bytes]) -> object:
        return dict.fromkeys(keys, b"not a record")

    def announce(self, message: object) -> object:
        return "certainly"


class Nodes:
    """The Ray cluster of this module: a node per name, and what runs on each."""

    def __init__(self, folder: Path) -> None:
        self.settings = ClusterStoreSettings(
            folder=str(folder),
            shard=ShardSettings(budget_bytes=8 << 20),
            service=f"test-{os.getpid()}",
            namespace="rakv-test",
            client=PATIENT,
            manager=ManagerLimits(poll_s=0.2),
        )
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args=self._arguments("head") | {"_system_config": FAST_FAILURE_DETECTION},
        )
        self._raylets = {"head": self.cluster.head_node}
        ray.init(address=self.cluster.address, namespace="rakv-test", log_to_driver=False)
        self._askers: dict[str, Any] = {}

    def add(self, name: str) -> None:
        self._raylets[name] = self.cluster.add_node(**self._arguments(name))

    def remove(self, name: str) -> None:
        """The node dies with all its processes, without a word."""
        self._askers.pop(name, None)
        self.cluster.remove_node(self._raylets.pop(name), allow_graceful=False)

    def id(self, name: str) -> str:
        return self._raylets[name].node_id

    def asker(self, name: str) -> Any:
        if name not in self._askers:
            self._askers[name] = self.new_asker(name, self.settings)
        return self._askers[name]

    def new_asker(self, name: str, settings: ClusterStoreSettings) -> Any:
        return self.on(name, Asker).options(max_concurrency=16).remote(settings)

    def on(self, name: str, cls: type) -> Any:
        here = NodeAffinitySchedulingStrategy(self.id(name), soft=False)
        return ray.remote(num_cpus=0, scheduling_strategy=here)(cls)

    def shard(self, name: str) -> Any:
        return ray.get_actor(shard_name(self.settings.service, self.id(name)), "rakv-test")

    def info(self, name: str) -> Any:
        return ray.get(self.shard(name).info.remote())

    def see_each_other(self) -> bool:
        """Whether every shard and every asker knows all nodes."""
        ids = tuple(sorted(self.id(name) for name in self._raylets))
        try:
            return all(self.info(name).nodes == ids for name in self._raylets)
        except (ValueError, RayError):  # not there yet, or just gone
            return False

    def close(self) -> None:
        stop_cluster_store(self.settings)
        ray.shutdown()
        self.cluster.shutdown()

    def _arguments(self, name: str) -> dict[str, Any]:
        return {"num_cpus": 1, "labels": {"rakv-shard": name}, "include_dashboard": False}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("shards"))
    nodes.add("a")
    nodes.add("b")
    assert len(start_cluster_store(nodes.settings, timeout_s=120.0)) == 3
    yield nodes
    nodes.close()


def call(method: Any, *args: Any) -> Any:
    return ray.get(method.remote(*args), timeout=2 * PATIENCE_S)


def spread(nodes: Nodes, numbers: range, source: str = "a") -> None:
    """Put records on one node and wait until the others know."""
    assert call(nodes.asker(source).put, numbers) == len(numbers)
    for name in {"head", "a", "b"} - {source}:
        eventually(
            lambda name=name: call(nodes.asker(name).find, numbers) == list(numbers),
            f"{name} finds what {source} stored",
        )


def test_what_one_node_stored_is_loaded_on_the_others_and_fills_them(nodes: Nodes) -> None:
    numbers = range(20)
    spread(nodes, numbers)
    for name in ("head", "b"):
        asker = nodes.asker(name)
        assert call(asker.load, numbers) == list(numbers)
        assert call(asker.drain)
        assert call(asker.load, numbers) == list(numbers)
        counters = call(asker.counters)
        assert counters["remote_hits"] == counters["fills_taken"] == len(numbers)
        assert counters["local_disk_hits"] == len(numbers)
        assert counters["remote_damaged"] == counters["fills_lost"] == 0
    assert call(nodes.asker("a").counters)["reads_served"] == 2 * len(numbers)


def test_an_operator_sees_warms_evicts_and_clears_on_every_node(nodes: Nodes) -> None:
    admin = open_store_admin(nodes.settings, SystemClock())
    spread(nodes, range(800, 810))
    keys = [tiny_record(number).key for number in range(800, 810)]
    assert set(admin.lookup(keys)[nodes.id("a")]) == set(keys)
    assert admin.lookup(keys)[nodes.id("b")] == {}
    assert set(admin.warm(keys, [nodes.id("b")])[nodes.id("b")]) == set(keys)
    assert admin.pin(keys, "operator", ttl_s=60.0)[nodes.id("b")] == keys
    assert admin.stats()[nodes.id("b")].counters["pinned_records"] == len(keys)
    assert admin.unpin(keys, "operator")[nodes.id("b")] == len(keys)
    held = {node: len(keys) for node, keys in admin.evict(keys[:4]).items()}
    assert held == {nodes.id("a"): 4, nodes.id("b"): 4, nodes.id("head"): 0}
    before = admin.stats()
    assert admin.clear(TINY_NAMESPACE) == {n: stats.records for n, stats in before.items()}
    assert {stats.records for stats in admin.stats().values()} == {0}
    assert set(before) == set(admin.members())


def test_ten_thousand_lookups_hold_nothing(nodes: Nodes) -> None:
    numbers = range(100, 200)
    spread(nodes, numbers)
    refs = [nodes.asker("a").find.remote(numbers) for _ in range(100)]
    assert all(found == list(numbers) for found in ray.get(refs))
    stats = open_store_admin(nodes.settings, SystemClock()).stats()
    assert {shard.counters["pinned_records"] for shard in stats.values()} == {0}
    # What nothing holds can go at once, everywhere.
    assert call(nodes.asker("b").delete, numbers) == len(numbers)
    assert call(nodes.asker("a").find, numbers) == []


def test_sixteen_cold_requests_compute_once(nodes: Nodes) -> None:
    askers = [nodes.asker(name) for name in ("head", "a", "b")]
    refs = [askers[index % 3].compute_once.remote(300, f"request-{index}") for index in range(16)]
    assert sum(ray.get(refs, timeout=2 * PATIENCE_S)) == 1


def test_replicas_on_three_nodes_compute_a_cold_document_once(nodes: Nodes) -> None:
    """Sixteen requests at once, through the engines, for each of some documents in turn."""
    eventually(nodes.see_each_other, "all shards agree on who owns which key")
    replicas = [
        nodes.on(name, FakeReplica).remote(nodes.settings, name, PATIENCE_S)
        for name in ("head", "a", "b")
    ]
    assert all(ray.get([replica.ready.remote() for replica in replicas], timeout=2 * PATIENCE_S))
    questions = [[50 + index % 14, index] for index in range(16)]

    for step in range(1, 6):
        document = [(index * 5 + step) % 50 for index in range(96)]
        refs = [
            replica.ask.remote(document, questions[index::3])
            for index, replica in enumerate(replicas)
        ]
        asked = ray.get(refs, timeout=2 * PATIENCE_S)
        for index, answers in enumerate(asked):
            expected = [FakeRunner().generate([*document, *q], 4) for q in questions[index::3]]
            assert [token_ids for token_ids, _ in answers] == expected
        computed = [[tokens for _, tokens in answers] for answers in asked]
        counters = ray.get([replica.counters.remote() for replica in replicas])
        assert sum(map(sum, computed)) == len(document), (computed, counters)
    for replica in replicas:
        ray.kill(replica)


def test_no_request_fails_while_nodes_die_and_come(nodes: Nodes) -> None:
    """Two replicas go on answering about documents of which some lie on the node that dies."""
    nodes.add("mortal")
    eventually(nodes.see_each_other, "the new node has a shard")
    mortal, *replicas = [
        nodes.on(name, FakeReplica).remote(nodes.settings, f"{name}-2", PATIENCE_S)
        for name in ("mortal", "head", "b")
    ]
    documents = [[(index * 7 + shift) % 50 for index in range(48)] for shift in range(4)]
    for document in documents[:2]:
        call(mortal.ask, document, [[63, 0]])
    stop = threading.Event()
    wrong: list[object] = []
    answered = 0

    def ask() -> None:
        nonlocal answered
        while not stop.is_set():
            for number, document in enumerate(documents):
                question = [50 + number, answered % 50]
                try:
                    ((tokens, _),) = call(replicas[answered % 2].ask, document, [question])
                except RayError as error:
                    wrong.append(error)
                    return
                if tokens != FakeRunner().generate([*document, *question], 4):
                    wrong.append((document, tokens))
                answered += 1

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: answered >= 4 or bool(wrong), "requests run")
    nodes.remove("mortal")
    eventually(nodes.see_each_other, "the dead node is forgotten")
    nodes.add("heir")
    eventually(nodes.see_each_other, "another node has joined")
    before = answered
    eventually(lambda: answered >= before + 4 or bool(wrong), "requests go on")
    stop.set()
    thread.join(PATIENCE_S)
    assert wrong == []
    nodes.remove("heir")
    eventually(nodes.see_each_other, "its part is over")
    for replica in replicas:
        ray.kill(replica)


def test_a_killed_shard_actor_comes_back_with_its_records(nodes: Nodes) -> None:
    numbers = range(400, 410)
    spread(nodes, numbers)
    before = nodes.info("a")
    os.kill(before.pid, signal.SIGKILL)
    # This node's processes read the files themselves and need no actor for it.
    assert call(nodes.asker("a").load, numbers) == list(numbers)
    served = call(nodes.asker("b").load, numbers)
    assert served in ([], list(numbers))
    eventually(lambda: _answers(nodes, "a") not in ("", before.incarnation), "the shard is back")
    eventually(lambda: call(nodes.asker("head").load, numbers) == list(numbers), "loaded again")


def _answers(nodes: Nodes, name: str) -> str:
    try:
        return nodes.info(name).incarnation
    except (ValueError, RayError):
        return ""


def test_a_stalled_shard_costs_a_deadline_and_not_a_request(nodes: Nodes) -> None:
    numbers = range(500, 510)
    spread(nodes, numbers)
    hasty = nodes.new_asker("b", dataclasses.replace(nodes.settings, client=HASTY))
    eventually(lambda: call(hasty.find, numbers) == list(numbers), "b finds what a stored")
    pid = nodes.info("a").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        # It would be stalled for ever: that these calls end is the deadline's work.
        for _ in range(3):
            assert call(hasty.load, numbers) == []
        assert call(nodes.asker("a").load, numbers) == list(numbers)
        assert call(hasty.put, range(510, 512)) == 2
        eventually(lambda: call(hasty.load, range(510, 512)) == [510, 511], "b has its own")
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: call(hasty.load, numbers) == list(numbers), "served again")
    ray.kill(hasty)


def test_garbage_from_a_shard_is_a_miss(nodes: Nodes) -> None:
    settings = dataclasses.replace(nodes.settings, service="garbage")
    members = (nodes.id("a"), nodes.id("b"))

    garbage = nodes.on("a", GarbageShard).options(name=shard_name("garbage", members[0]))
    real = nodes.on("b", ShardActor).options(
        name=shard_name("garbage", members[1]), max_concurrency=10
    )
    held = [garbage.remote(members[0]), real.remote(members[1], "garbage", settings)]
    call(held[1].set_nodes, members)
    asker = nodes.new_asker("b", settings)
    eventually(lambda: bool(call(asker.refresh)), "b's shard answers")
    numbers = range(600, 620)
    assert call(asker.load, numbers) == []
    assert call(asker.counters)["calls_garbage"] > 0
    assert call(asker.put, numbers) == len(numbers)
    assert call(asker.load, numbers) == list(numbers)
    call(held[1].close)
    for actor in (asker, *held):
        ray.kill(actor)


def test_a_node_that_is_removed_as_planned_leaves_its_records_behind(nodes: Nodes) -> None:
    nodes.add("leaving")
    eventually(nodes.see_each_other, "the new node has a shard")
    numbers = range(900, 940)
    spread(nodes, numbers, source="leaving")
    admin = open_store_admin(nodes.settings, SystemClock())

    drained = admin.drain(nodes.id("leaving"), limit_bytes=1 << 30, deadline_s=PATIENCE_S)

    assert (drained.left, drained.copied + drained.elsewhere) == (0, len(numbers))
    nodes.remove("leaving")
    eventually(nodes.see_each_other, "the node is forgotten")
    for name in ("head", "a", "b"):
        asker = nodes.asker(name)
        eventually(
            lambda a=asker: call(a.load, numbers) == list(numbers), f"{name} gets all that it had"
        )


def test_nodes_die_and_come_while_loads_run(nodes: Nodes) -> None:
    nodes.add("c")
    eventually(nodes.see_each_other, "the new node has a shard")
    filled, lost = range(700, 720), range(720, 740)
    assert call(nodes.asker("c").put, range(700, 740)) == 40
    for name in ("head", "b"):
        asker = nodes.asker(name)
        eventually(lambda a=asker: call(a.load, filled) == list(filled), f"{name} loads")
        assert call(asker.drain)
    stop = threading.Event()
    failures: list[Exception] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                assert set(call(nodes.asker("b").load, range(700, 740))) >= set(filled)
            except (AssertionError, RayError) as error:
                failures.append(error)
                return

    thread = threading.Thread(target=ask)
    thread.start()
    nodes.remove("c")
    eventually(nodes.see_each_other, "the dead node is forgotten")
    nodes.add("d")
    eventually(nodes.see_each_other, "another node has joined")
    stop.set()
    thread.join(PATIENCE_S)
    assert failures == []
    for name in ("head", "b", "a", "d"):
        asker = nodes.asker(name)
        eventually(
            lambda a=asker: call(a.load, filled) == list(filled),
            f"{name} still gets what was filled",
        )
    # The asker's last load may have fetched some of the rest before the node died.
    assert set(call(nodes.asker("head").load, lost)) <= set(call(nodes.asker("b").load, lost))
