"""Start, use and stop a cluster store on the Ray cluster that this process is connected to."""

from __future__ import annotations

import logging
import time

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.cluster.ray_fleet import ManagerActor, get_manager, kill_actor, manager_name
from rakv_cluster.cluster.ray_transport import RayTransport
from rakv_cluster.cluster.settings import ClusterStoreSettings
from rakv_cluster.cluster.store_client import NodeStore
from rakv_cluster.errors import StoreUnavailable

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_STOP_TIMEOUT_S = 30.0
_ADMIN_TIMEOUT_S = 10.0


def start_cluster_store(
    settings: ClusterStoreSettings, *, timeout_s: float = 60.0
) -> tuple[str, ...]:
    """Start a shard on every node, now and as nodes come; returns the nodes that have one.

    Waits until every live node has, at most for ``timeout_s``; says so in the log where that was
    too short. The service works without: its cache is then empty. Idempotent.
    """
    here = ray.get_runtime_context().get_node_id()
    manager = (
        ray.remote(ManagerActor)
        .options(
            name=manager_name(settings.service),
            namespace=settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
            max_restarts=settings.actor.max_restarts,
            max_concurrency=4,
            num_cpus=0,
        )
        .remote(settings)
    )
    deadline_s = time.monotonic() + timeout_s
    members: tuple[str, ...] = ()
    while time.monotonic() < deadline_s:
        try:
            members = ray.get(manager.members.remote(), timeout=timeout_s)
        except (GetTimeoutError, RayActorError):
            break
        alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]}
        if alive <= set(members):
            return members
        time.sleep(_POLL_S)
    _log.warning("%d nodes have a shard after %.0f s; others start later", len(members), timeout_s)
    return members


def stop_cluster_store(settings: ClusterStoreSettings) -> None:
    """End all shards and their manager; what is stored stays on the disks. Idempotent."""
    try:
        ray.get(get_manager(settings).stop.remote(), timeout=_STOP_TIMEOUT_S)
    except ValueError:
        return
    except (GetTimeoutError, RayActorError) as error:
        _log.warning("the node manager did not stop in order: %s", error)
    kill_actor(manager_name(settings.service), settings.namespace)


def open_store_admin(settings: ClusterStoreSettings, clock: Clock) -> StoreAdmin:
    """An operator's access to all shards, from any process of the Ray cluster.

    Its calls raise ``StoreUnavailable`` while the service's node manager cannot be reached.
    """

    def members() -> tuple[str, ...]:
        try:
            answer = ray.get(get_manager(settings).members.remote(), timeout=_ADMIN_TIMEOUT_S)
        except (ValueError, GetTimeoutError, RayActorError) as error:
            raise StoreUnavailable(f"no node manager of {settings.service}: {error}") from error
        return tuple(answer)

    return StoreAdmin(RayTransport(settings.service, settings.namespace), members, clock)


def open_node_store(
    settings: ClusterStoreSettings, clock: Clock, *, timeout_s: float = 10.0
) -> NodeStore:
    """This process's access to the store, on the node it runs on.

    Waits at most ``timeout_s`` for the node's shard; without one the store is empty until there is.
    """
    node = ray.get_runtime_context().get_node_id()
    transport = RayTransport(settings.service, settings.namespace)
    store = NodeStore(node, transport, settings.client, clock, codec=settings.codec)
    deadline_s = time.monotonic() + timeout_s
    while not store.refresh():
        if time.monotonic() >= deadline_s:
            _log.warning("node %s has no shard yet; its cache is empty until it has", node)
            break
        time.sleep(_POLL_S)
    return store
