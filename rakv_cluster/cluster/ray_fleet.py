"""Shard actors on a Ray cluster, and the detached actor that manages them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rakv_cluster.clock import SystemClock
from rakv_cluster.cluster.membership import Node, NodeManager
from rakv_cluster.cluster.peers import Answer, Call, Failure
from rakv_cluster.cluster.ray_transport import RayTransport, shard_name
from rakv_cluster.cluster.settings import ClusterStoreSettings
from rakv_cluster.cluster.shard_actor import ShardActor

_log = logging.getLogger(__name__)

FOLDER_LABEL = "rakv-shard"
_CONCURRENT_CALLS = 1000
_CLOSE_TIMEOUT_S = 10.0


class RayFleet:
    """See :class:`~rakv_cluster.cluster.membership.Fleet`."""

    def __init__(self, settings: ClusterStoreSettings) -> None:
        self._settings = settings
        self._transport = RayTransport(settings.service, settings.namespace)

    def nodes(self) -> Sequence[Node]:
        return [
            Node(row["NodeID"], row["Labels"].get(FOLDER_LABEL, "shard"))
            for row in ray.nodes()
            if row["Alive"]
        ]

    def start(self, node: Node) -> None:
        actor = ray.remote(ShardActor).options(
            name=shard_name(self._settings.service, node.node),
            namespace=self._settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            # Hard affinity: an actor elsewhere could not write this node's files. On a dead node
            # it never comes back, which is what the manager is for.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node, soft=False),
            max_restarts=self._settings.actor.max_restarts,
            max_task_retries=0,
            max_concurrency=_CONCURRENT_CALLS,
            num_cpus=0,
        )
        actor.remote(node.node, node.folder, self._settings)

    def stop(self, node: str) -> None:
        self._transport.call([Call(node, "close")], _CLOSE_TIMEOUT_S)
        kill_actor(shard_name(self._settings.service, node), self._settings.namespace)

    def ping(self, nodes: Sequence[str], members: Sequence[str]) -> Mapping[str, bool]:
        calls = [Call(node, "set_nodes", (tuple(members),)) for node in nodes]
        outcomes = self._transport.call(calls, self._settings.manager.ping_timeout_s)
        alive = {}
        for node, outcome in zip(nodes, outcomes, strict=True):
            if isinstance(outcome, Answer):
                alive[node] = True
            elif outcome.failure is Failure.GONE:
                alive[node] = False
        return alive


class ManagerActor:
    """Runs a :class:`NodeManager` in a thread, so that calls are answered meanwhile."""

    def __init__(self, settings: ClusterStoreSettings) -> None:
        self._manager = NodeManager(RayFleet(settings), settings.manager, SystemClock())
        self._poll_s = settings.manager.poll_s
        self._members: tuple[str, ...] = ()  # the manager itself belongs to the thread
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rakv-node-manager", daemon=True)
        self._thread.start()

    def members(self) -> tuple[str, ...]:
        """Nodes whose shard serves."""
        return self._members

    def stop(self) -> bool:
        """End every shard, for good."""
        self._ending.set()
        self._thread.join()
        self._manager.stop()
        return True

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._manager.step()
                self._members = self._manager.members
            except RayError:
                # The control plane is away for a moment; shards go on without their manager.
                _log.exception("node manager could not look at the cluster")
            self._ending.wait(self._poll_s)


def manager_name(service: str) -> str:
    """The Ray name of a service's node manager."""
    return f"rakv-store-manager/{service}"


def kill_actor(name: str, namespace: str) -> None:
    """End a named actor for good; nothing where there is none."""
    try:
        ray.kill(ray.get_actor(name, namespace), no_restart=True)
    except ValueError:
        _log.debug("no actor %s to end", name)


def get_manager(settings: ClusterStoreSettings) -> Any:
    """The service's node manager; raises ``ValueError`` where there is none."""
    return ray.get_actor(manager_name(settings.service), settings.namespace)
