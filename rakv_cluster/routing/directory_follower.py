"""Keeps a snapshot of the directory beside a router, in a thread of its own.

Asks every partition once a second for what changed since the last time. A partition that does not
answer leaves its part of the snapshot as it was: locations are hints.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ray

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.directory import Changes, DirectorySnapshot
from rakv_cluster.cluster.messages import ShardInfo, parse_info
from rakv_cluster.cluster.peers import Answer, Call, Peers
from rakv_cluster.cluster.ray_transport import RayTransport
from rakv_cluster.cluster.settings import ClusterStoreSettings
from rakv_cluster.routing.locations import Holders, directory_holders
from rakv_cluster.store.worker_thread import WorkerThread

_BATCH_CHANGES = 4096
_MOST_ROUNDS = 8


class DirectoryFollower:
    """Follows the directory as the shard on ``node`` knows its members. Any thread may locate."""

    def __init__(
        self, node: str, peers: Peers, *, period_s: float = 1.0, timeout_s: float = 0.5
    ) -> None:
        self._node = node
        self._peers = peers
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._snapshot = DirectorySnapshot()
        self._nodes: tuple[str, ...] = ()
        self._thread = WorkerThread(
            "rakv-directory", queue_limit=1, on_idle=self.refresh, idle_s=period_s
        )

    def holders(self, keys: Sequence[bytes]) -> Holders:
        """Nodes that hold the leading ``keys``, up to the first that none is known to hold."""
        if not keys:
            return ()
        with self._lock:
            located = self._snapshot.locate(keys)
        return directory_holders(keys, located)

    def refresh(self) -> None:
        """Catch up now."""
        (answer,) = self._peers.ask([Call(self._node, "info")], self._timeout_s, parse_info)
        if isinstance(answer, Answer):
            self._adopt(answer.value)
        for _ in range(_MOST_ROUNDS):  # a reader far behind gets its changes in several answers
            if not self._follow():
                break

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _adopt(self, info: ShardInfo) -> None:
        if info.nodes == self._nodes:
            return
        self._nodes = info.nodes
        self._peers.set_nodes(info.nodes)
        with self._lock:
            self._snapshot.set_nodes(info.nodes)

    def _follow(self) -> bool:
        """One answer of every partition; whether any may have more."""
        with self._lock:
            positions = dict(self._snapshot.positions())
        calls = [Call(node, "changes", (at, _BATCH_CHANGES)) for node, at in positions.items()]
        answers = self._peers.ask(calls, self._timeout_s, _parse_changes) if calls else []
        more = False
        for call, answer in zip(calls, answers, strict=True):
            if not isinstance(answer, Answer):
                continue
            with self._lock:
                self._snapshot.apply(call.node, answer.value)
            more |= answer.value.position.left > 0 or len(answer.value.changes) >= _BATCH_CHANGES
        return more


def follow_directory(settings: ClusterStoreSettings, clock: Clock) -> DirectoryFollower:
    """A follower in this process of the Ray cluster, by way of its node's shard."""
    node = ray.get_runtime_context().get_node_id()
    transport = RayTransport(settings.service, settings.namespace)
    return DirectoryFollower(node, Peers(transport, settings.client.breaker, clock))


def _parse_changes(value: object) -> Changes:
    if not isinstance(value, Changes):
        raise ValueError(f"changes of the directory are not a {type(value).__name__}")
    return value
