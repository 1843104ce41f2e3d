"""Replicas come when the backlog asks for them, take work, and leave without losing any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rakv_cluster.cli.local_service import LocalService
from rakv_cluster.testing.processes import served, workers
from rakv_cluster.testing.traffic import traffic
from rakv_cluster.testing.waiting import eventually

pytestmark = pytest.mark.cluster
CLIENTS = 6


@pytest.fixture(scope="module")
def service(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("scaling")
    config = folder / "rakv.yaml"
    config.write_text(
        "store: memory\nmax_replicas: 2\nmax_running: 2\nthreads: 1\ntarget_backlog_ms: 20\n"
        "scale_up_delay_s: 0\nscale_down_delay_s: 1\n"
    )
    with served(
        {"model": str(tiny_folder), "config": str(config)}, folder / "serve.log"
    ) as running:
        yield running


@contextmanager
def asking(service: LocalService) -> Iterator[list[int]]:
    """Clients that ask one question after another; yields the status codes so far."""
    codes: list[int] = []
    with httpx.Client(base_url=service.base_url, timeout=180.0) as http:

        def ask(client: int, number: int) -> None:
            body = {"prompt": f"{client} {number} " * 150, "max_tokens": 40}
            codes.append(http.post("/v1/completions", json=body).status_code)

        with traffic(CLIENTS, ask):
            yield codes


def replicas(service: LocalService) -> list[dict[str, float]]:
    """What the router knows of each replica."""
    answer = httpx.post(f"{service.base_url}/v1/route/explain", json={"prompt": "x"}, timeout=60.0)
    listed: list[dict[str, float]] = answer.raise_for_status().json()["replicas"]
    return listed


def test_a_second_replica_comes_takes_work_and_goes(service: LocalService) -> None:
    assert len(workers(service)) == 1
    with asking(service) as codes:
        eventually(lambda: len(replicas(service)) == 2, "a second replica", timeout_s=240)
        eventually(
            lambda: all(
                each["backlog_ms"] + each["slot_wait_ms"] > 0 for each in replicas(service)
            ),
            "both have work",
            timeout_s=120,
        )
    eventually(lambda: len(replicas(service)) == 1, "the second replica has gone", timeout_s=120)

    assert len(codes) > CLIENTS
    assert set(codes) == {200}
