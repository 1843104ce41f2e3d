"""deploy/serve.yaml started by `serve run`, as an operator would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

import rakv_cluster
from rakv_cluster.cli.local_service import free_port
from rakv_cluster.testing.waiting import eventually

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
    log = tmp_path / "serve.log"
    with log.open("wb") as output, subprocess.Popen(
        command, stdout=output, stderr=output, cwd=tmp_path
    ) as process:  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        body = {
            "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8,
            "documents": [{"id": "a", "text": "Alpha line.\n\n" * 60}],
        }  # fmt: skip

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(ready, "the service is ready", timeout_s=TIMEOUT_S)
            first, again = (
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120) for _ in range(2)
            )
            metrics = httpx.get(f"{url}/metrics", timeout=30).text
            dashboard = httpx.get(f"{url}/dashboard/data", timeout=30).json()
        finally:
            # Not SIGINT: where tests run in a shell's background it is ignored by all they start.
            process.terminate()
            process.wait(TIMEOUT_S)

    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    assert "rakv_replicas 1.0" in metrics
    assert len(dashboard["shards"]) == 1
    assert len(dashboard["recent"]) == 2
