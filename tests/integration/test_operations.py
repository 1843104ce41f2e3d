"""docs/operations.md on a Ray cluster of two nodes, with requests going on all the time.

One service is updated, scaled up, loses a node, and is scaled down. Every answer must be the first
one, and none may fail.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.cluster_utils import Cluster

import rakv_cluster
from rakv_cluster.cli.local_service import free_port
from rakv_cluster.testing.waiting import eventually, first_where

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(rakv_cluster.__file__).parent.parent
PATIENCE_S = 120.0
ASK = {
    "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "temperature": 0,
    "documents": [{"id": "a", "text": "Alpha line.\n\n" * 40}],
}  # fmt: skip
FAST_FAILURE_DETECTION = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    # A dead raylet refuses the connection at once; a busy machine must not look like one.
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
}


class Operated:
    """A service, and what an operator does to it: `serve deploy` of a changed file."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._file = folder / "serve.yaml"
        self._dashboard, port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
        self._config["proxy_location"] = "HeadOnly"
        self._config["http_options"]["port"] = port
        (application,) = self._config["applications"]
        self.args = application["args"]
        self.args |= {
            "model": str(model), "threads": 1, "store_dir": str(folder / "store"),
            "price_loads": False, "packed_budget_bytes": 0, "ram_budget_bytes": "64MiB",
            "disk_budget_bytes": "64MiB", "kv_budget_bytes": "64MiB",
        }  # fmt: skip
        self.ingress, self.worker = application["deployments"]
        # The node that is lost must not be the one through which the requests come.
        on_head = {"num_cpus": 0, "resources": {"head": 0.01}}
        self.ingress |= {"num_replicas": 1, "ray_actor_options": on_head}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args=node("n0")
            | {
                "resources": {"head": 1},
                "include_dashboard": True,
                "dashboard_port": self._dashboard,
                "_system_config": FAST_FAILURE_DETECTION,
            },
        )

        # The head runs before its dashboard answers, which is what `serve deploy` asks.
        eventually(self._dashboard_answers, "Ray's dashboard answers", timeout_s=PATIENCE_S)

    def _dashboard_answers(self) -> bool:
        url = f"http://127.0.0.1:{self._dashboard}/api/serve/applications/"
        try:
            return httpx.get(url, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def deploy(self) -> None:
        """The file as it is now."""
        self._file.write_text(yaml.safe_dump(self._config))
        command = [Path(sys.executable).with_name("serve"), "deploy", self._file]
        address = f"http://127.0.0.1:{self._dashboard}"
        done = subprocess.run(
            [*command, "-a", address], check=False, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def ready(self) -> bool:
        try:
            return self.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def replicas(self) -> list[str]:
        """Those that answer; none while the Ingress is being replaced."""
        return sorted(self.stats().get("replicas", ()))

    def stats(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.get("/v1/cache/stats").json()
        except (httpx.TransportError, ValueError):  # no connection, or the proxy's own words
            return {}
        return found

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self._url + path, timeout=60)

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self._url}/v1/chat/completions", json=ASK, timeout=180)

    def close(self) -> None:
        self.cluster.shutdown()


def node(name: str) -> dict[str, Any]:
    return {"num_cpus": 1, "labels": {"rakv-shard": name}, "include_dashboard": False}


class Traffic:
    """Requests one after the other in two threads; what was not the expected answer."""

    def __init__(self, operated: Operated, expected: str) -> None:
        self._operated, self._expected = operated, expected
        self._over = threading.Event()
        self.right = 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 10) -> Callable[[], bool]:
        """A condition: so many more were answered from now on."""
        target = self.right + count
        return lambda: bool(self.wrong) or self.right >= target

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                response = self._operated.ask()
            except httpx.TransportError as error:
                self.wrong.append(repr(error))
                continue
            if response.status_code == 200 and said(response) == self._expected:
                self.right += 1
            else:
                self.wrong.append(f"{response.status_code}: {response.text[:200]}")


def said(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@pytest.fixture
def operated(tiny_folder: Path, tmp_path: Path) -> Iterator[Operated]:
    operated = Operated(tiny_folder, tmp_path)
    yield operated
    operated.close()


def test_no_request_is_lost_while_the_service_is_operated(operated: Operated) -> None:
    operated.worker["num_replicas"] = 1
    operated.deploy()
    eventually(operated.ready, "the service is ready", timeout_s=PATIENCE_S)
    expected = said(operated.ask())

    with Traffic(operated, expected) as traffic:

        def settled(condition: Callable[[list[str]], bool], what: str) -> None:
            eventually(lambda: condition(operated.replicas()), what, timeout_s=PATIENCE_S)
            eventually(traffic.more(), f"answers after: {what}", timeout_s=PATIENCE_S)
            assert traffic.wrong == [], what

        before = first_where(
            operated.replicas, lambda now: len(now) == 1, "one replica", timeout_s=PATIENCE_S
        )
        operated.args["max_waiting"] = 48
        operated.deploy()
        settled(lambda now: len(now) == 1 and now != before, "rolling update")

        added = operated.cluster.add_node(**node("n1"))
        operated.worker["num_replicas"] = 2
        operated.deploy()
        settled(lambda now: len(now) == 2, "scale up")

        two = first_where(
            operated.replicas, lambda now: len(now) == 2, "two replicas", timeout_s=PATIENCE_S
        )
        operated.cluster.remove_node(added, allow_graceful=False)
        settled(lambda now: len(now) == 1 and now[0] in two, "node loss")

        operated.cluster.add_node(**node("n1"))
        settled(lambda now: len(now) == 2, "the node is back")

        operated.worker["num_replicas"] = 1
        operated.deploy()
        settled(lambda now: len(now) == 1, "scale down")

        eventually(
            lambda: len(operated.stats().get("shards_by_node", ())) == 2,
            "each node has a shard",
            timeout_s=PATIENCE_S,
        )
    assert traffic.wrong == []
