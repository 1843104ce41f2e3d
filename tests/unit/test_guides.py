"""Every Python snippet of docs/guides runs, against a real HTTP server on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI

import rakv_cluster
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.document_api import add_document_routes
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.service import Service
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.grpc_server import grpc_server
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

ROOT = Path(rakv_cluster.__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
HTTP_URL = "http://127.0.0.1:8000"
GRPC_TARGET = "127.0.0.1:8001"


@dataclass(frozen=True, slots=True)
class Services:
    """Where the two surfaces answer."""

    url: str
    target: str


def snippets() -> list[tuple[str, str]]:
    found = []
    for guide in GUIDES:
        code = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
        found += [(f"{guide.stem}-{index}", text) for index, text in enumerate(code)]
    return found


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    def service() -> Service:
        backend = ScriptedBackend(lambda prompt: "An answer.")
        return scripted_service(backend, Settings(), ManualClock())

    shards = SimulatedShards([], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, tuple, ManualClock())

    async def application() -> FastAPI:
        made, metrics = service(), ServiceMetrics()
        app = create_app(made, metrics)
        add_document_routes(app, made, CacheApi(made, metrics, admin))
        return app

    with (
        http_server(application) as url,
        grpc_server(service, admin) as target,
    ):
        yield Services(url, target)


@pytest.mark.parametrize(("name", "code"), snippets(), ids=lambda value: value.split("\n")[0][:40])
def test_the_snippet_runs(name: str, code: str, services: Services) -> None:
    asks = code.replace(HTTP_URL, services.url).replace(GRPC_TARGET, services.target)
    assert asks != code, "a snippet that asks no service would be tested against none"

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", asks],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "An answer." in done.stdout


def test_there_are_snippets() -> None:
    assert len(snippets()) >= 2
