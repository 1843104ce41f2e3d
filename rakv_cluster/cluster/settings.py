"""Limits of the cluster store. Every queue, batch and wait has its bound here."""

from __future__ import annotations

from dataclasses import dataclass, field

from rakv_cluster.cluster.breaker import BreakerLimits
from rakv_cluster.kv.codec import Codec
from rakv_cluster.store.shard_writer import ShardSettings


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """Of one node's shard actor.

    ``queue_bytes`` of records wait for the writer at most; what does not fit is dropped.
    ``reply_bytes`` bound one answer to a remote read, ``batch_keys`` every batch of keys.
    """

    queue_bytes: int = 256 << 20
    reply_bytes: int = 8 << 20
    batch_keys: int = 4096
    reader_threads: int = 2
    announce_timeout_s: float = 2.0
    heartbeat_s: float = 5.0
    max_restarts: int = 3


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of one process's :class:`~rakv_cluster.cluster.store_client.NodeStore`.

    ``lookup_timeout_s`` bounds what a find may wait for other nodes, ``load_timeout_s`` one batch
    of a load; past it the records count as misses, as does what does not come at
    ``load_floor_bytes_per_s`` altogether. Records travel in batches of ``batch_bytes``; so many
    batches that were loaded from other nodes wait at most to fill this node's shard.
    """

    lookup_timeout_s: float = 0.25
    load_timeout_s: float = 2.0
    load_floor_bytes_per_s: float = 20e6
    write_timeout_s: float = 10.0
    batch_bytes: int = 4 << 20
    fill_batches: int = 32
    batch_keys: int = 1024
    refresh_s: float = 1.0
    await_poll_s: float = 0.05
    remembered_routes: int = 100_000
    breaker: BreakerLimits = field(default_factory=BreakerLimits)


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Of the node manager.

    It looks every ``poll_s``, waits ``ping_timeout_s`` for shards to answer, and replaces one that
    has not answered for ``silence_s``. One that does not start is tried again after
    ``min_backoff_s``, doubled each time up to ``max_backoff_s``.
    """

    poll_s: float = 1.0
    ping_timeout_s: float = 2.0
    silence_s: float = 60.0
    min_backoff_s: float = 1.0
    max_backoff_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ClusterStoreSettings:
    """A cluster store: who it is, where its records lie, its limits. Picklable.

    ``folder`` exists on every node; a node's shard lies in the folder's subfolder that the node's
    label ``rakv-shard`` names (``shard`` without one), so that several nodes may share a disk.
    ``namespace`` is the Ray namespace of its detached actors. With a lossy ``codec`` the disks
    serve approximate reuse only.
    """

    folder: str
    shard: ShardSettings
    service: str = "rakv"
    namespace: str = "rakv"
    codec: Codec = Codec.SPLIT
    actor: ShardLimits = field(default_factory=ShardLimits)
    client: ClientLimits = field(default_factory=ClientLimits)
    manager: ManagerLimits = field(default_factory=ManagerLimits)
