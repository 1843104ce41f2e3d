"""The store of one replica, as the settings ask for it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.cluster.ray_transport import RayTransport
from rakv_cluster.cluster.service import open_node_store, open_store_admin
from rakv_cluster.cluster.settings import ClusterStoreSettings
from rakv_cluster.config import Settings
from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.codec import Codec
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import NO_FLIGHT, SingleFlight
from rakv_cluster.store.folder import ShardFolder
from rakv_cluster.store.lmdb_shard import ShardSettings
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.telemetry import Figures

_CODECS = {"lossless": Codec.SPLIT, "fp16": Codec.HALF, "int8": Codec.INT8}
_PREDECESSOR_S = 5.0
_POLL_S = 0.1


def cluster_store_settings(settings: Settings) -> ClusterStoreSettings:
    """The service's settings in the cluster store's terms."""
    return ClusterStoreSettings(
        folder=str(settings.store_path),
        shard=ShardSettings(budget_bytes=int(settings.disk_budget_bytes)),
        codec=_CODECS[settings.disk_codec],
    )


def disk_problem(folder: Path) -> str:
    """Why this machine cannot keep a shard in ``folder``; empty if it can. Creates the folder.

    A writer that is just ending is waited for, some seconds.
    """
    shard = folder / "shard"
    try:
        shard.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=shard):
            pass
        deadline_s = time.monotonic() + _PREDECESSOR_S
        while problem := ShardFolder(shard).other_writer():
            if time.monotonic() >= deadline_s:
                return problem
            time.sleep(_POLL_S)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    except StoreUnavailable as error:
        return error.message
    return ""


def damage_notices(figures: Figures, folder: Path) -> tuple[str, ...]:
    """What a person should know about the store that a replica's ``figures`` tell of."""
    events = figures.get("store_events_total")
    if not isinstance(events, Mapping) or not events.get("quarantines"):
        return ()
    return (
        f"the store in {folder} was damaged: what was there is kept aside in its 'quarantine' "
        "folder, the cache starts empty",
    )


def open_admin(settings: Settings, clock: Clock) -> StoreAdmin:
    """An operator's access to the nodes' disks; to no node where the settings have no disk tier."""
    store = cluster_store_settings(settings)
    if settings.store == "tiered":
        return open_store_admin(store, clock)
    return StoreAdmin(RayTransport(store.service, store.namespace), tuple, clock)


@dataclass(frozen=True, slots=True)
class ReplicaStore:
    """Where a replica finds KV, and how it learns that another one is computing some.

    ``hottest(limit_bytes)`` names the records on disks that were used last.
    """

    store: ChunkStore
    flight: SingleFlight
    hottest: Callable[[int], Sequence[bytes]]


def _none(limit_bytes: int) -> Sequence[bytes]:
    return ()


def open_store(settings: Settings, memory: MemoryStore, clock: Clock) -> ReplicaStore:
    """``memory`` before the node's disk, ``memory`` alone, or nothing; called in a process of the
    Ray cluster.

    A disk that cannot be used costs only its tier.
    """
    if settings.store == "none":
        return ReplicaStore(NullStore(), NO_FLIGHT, _none)
    if settings.store == "memory":
        return ReplicaStore(memory, NO_FLIGHT, _none)
    nodes = open_node_store(cluster_store_settings(settings), clock)
    return ReplicaStore(TieredStore(memory, nodes), nodes, nodes.hottest)
