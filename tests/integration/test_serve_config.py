"""deploy/serve.yaml started by `serve run`, as an operator would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import rakv_cluster
from rakv_cluster.cli.local_service import free_port
from rakv_cluster.testing.chats import cached_tokens, reusing
from rakv_cluster.testing.waiting import eventually, first_where

pytestmark = pytest.mark.cluster

ROOT = Path(rakv_cluster.__file__).parent.parent
TIMEOUT_S = 240.0


def test_serve_run_starts_what_the_file_says(tiny_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    # This place has one node: one of each deployment instead of one per node.
    for deployment in application["deployments"]:
        deployment["num_replicas"] = 1
    application["args"] |= {
        "model": str(tiny_folder), "store_dir": str(tmp_path / "store"), "threads": 1,
        "price_loads": False, "ram_budget_bytes": "64MiB", "disk_budget_bytes": "256MiB",
    }  # fmt: skip
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [Path(sys.prefix) / "bin" / "serve", "run", "-a", "local", tmp_path / "serve.yaml"]
    # As of deploy/ray.env, which an operator sources first.
    environment = os.environ | {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20"}
    log = tmp_path / "serve.log"
    with log.open("wb") as output, subprocess.Popen(
        command, stdout=output, stderr=output, cwd=tmp_path, env=environment
    ) as process:  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        body = {
            "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8,
            "documents": [{"id": "a", "text": "Alpha line.\n\n" * 60}],
        }  # fmt: skip

        asked: list[httpx.Response] = []

        def ask() -> dict[str, Any]:
            asked.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120))
            answer: dict[str, Any] = asked[-1].raise_for_status().json()
            return answer

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return httpx.get(f"{url}/readyz", timeout=30).status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(ready, "the service is ready", timeout_s=TIMEOUT_S)
            again = reusing(ask)
            # A part that is late is left out of a scrape, and of the dashboard's data.
            first_where(
                lambda: httpx.get(f"{url}/metrics", timeout=30).text,
                lambda metrics: "rakv_replicas 1.0" in metrics,
                "the replica has figures",
            )
            dashboard = first_where(
                lambda: httpx.get(f"{url}/dashboard/data", timeout=30).json(),
                lambda data: not data["missing"],
                "the dashboard has all its data",
            )
        finally:
            # Not SIGINT: where tests run in a shell's background it is ignored by all they start.
            process.terminate()
            process.wait(TIMEOUT_S)

    assert cached_tokens(again) > 500
    assert len(dashboard["shards"]) == 1
    assert len(dashboard["recent"]) == min(len(asked), 20) > 1
