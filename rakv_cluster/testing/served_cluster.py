"""The service on a Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from httpx import codes
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ReplicaState

from rakv_cluster.cli.local_service import free_port
from rakv_cluster.serving.app import APP_NAME
from rakv_cluster.testing.processes import command, descendants
from rakv_cluster.testing.scrapes import scrape
from rakv_cluster.testing.waiting import eventually

HOST = "127.0.0.1"
_START_S = 480.0
_TAKEN = re.compile(r'^rakv_engine_requests_total\{replica="([^"]*)"\} (\S+)', re.MULTILINE)
_NODE_FAILURES = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    # A dead raylet refuses the connection at once; a busy machine must not look like one.
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
}


class ServedCluster:
    """A service with one replica a node; requests come in at ``url``, on the first node."""

    def __init__(self, nodes: int) -> None:
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        head = {"include_dashboard": False, "_system_config": _NODE_FAILURES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._others = [self._cluster.add_node() for _ in range(nodes - 1)]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    @contextmanager
    def served(self, settings: Mapping[str, Any], folder: Path) -> Iterator[None]:
        """``serve run`` as of deploy/serve.yaml, with ``settings``, once all replicas take work."""
        config = folder / "serve.yaml"
        config.write_text(yaml.safe_dump(self._config(settings)))
        command = [Path(sys.prefix) / "bin" / "serve", "run", "-a", self._cluster.address, config]
        log = folder / "serve.log"
        with log.open("wb") as output, subprocess.Popen(
            command, stdout=output, stderr=output
        ) as process:  # fmt: skip
            try:
                eventually(self._measured, "every replica has reported", timeout_s=_START_S)
                yield
            finally:
                process.terminate()
                process.wait(_START_S)

    def _config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        replicas = len(self._others) + 1
        worker = {"name": "Worker", "num_replicas": replicas, "max_replicas_per_node": 1}
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": HOST, "port": self._port},
            "applications": [
                {
                    "name": APP_NAME,
                    "route_prefix": "/",
                    "import_path": "rakv_cluster.serving.deploy:application",
                    "args": {"host": HOST, "threads": 1, "replicas": replicas, **settings},
                    "deployments": [worker],
                }
            ],
        }

    def _measured(self) -> bool:
        try:
            answer = httpx.post(f"{self.url}/v1/route/explain", json={"prompt": "x"}, timeout=60.0)
        except httpx.TransportError:
            return False
        if answer.status_code != codes.OK:
            return False
        found: dict[str, Any] = answer.json()
        return bool(found["measured"]) and len(found["replicas"]) == len(self._others) + 1

    def close(self) -> None:
        """End everything that was started."""
        ray.shutdown()
        self._cluster.shutdown()

    def add_node(self) -> None:
        """One more node joins."""
        self._others.append(self._cluster.add_node())

    def remove_node(self) -> None:
        """A node dies with all its processes, without a word: not the first nor the ingress's."""
        node = next(node for node in self._others if not self._runs(node, ":Ingress"))
        self._others.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    @staticmethod
    def _runs(node: Any, name: str) -> bool:
        (raylet,) = node.all_processes["raylet"]
        return any(name in command(pid) for pid in descendants(raylet.process.pid))

    def running(self) -> int:
        """Replicas that Serve says are running."""
        states = serve.status().applications[APP_NAME].deployments["Worker"].replica_states
        return int(states.get(ReplicaState.RUNNING, 0))

    def workers(self) -> list[int]:
        """Process ids of the replicas on all nodes, whose raylets are children of this process."""
        return [pid for pid in descendants(os.getpid()) if ":Worker" in command(pid)]

    def taken(self) -> dict[str, float]:
        """Requests that each replica has taken in, by its name."""
        text = scrape(
            lambda: httpx.get(f"{self.url}/metrics", timeout=60.0).raise_for_status().text
        )
        return {name: float(count) for name, count in _TAKEN.findall(text)}


@contextmanager
def served_cluster(
    nodes: int, settings: Mapping[str, Any], folder: Path
) -> Iterator[ServedCluster]:
    """A :class:`ServedCluster` that takes requests until the context ends; logs to ``folder``."""
    service = ServedCluster(nodes)
    try:
        with service.served(settings, folder):
            yield service
    finally:
        service.close()
