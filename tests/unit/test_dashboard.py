"""``/dashboard``: its data, who may see them, and what a browser makes of them.

The browser tests run headless Chromium where it is installed (Debian's `chromium`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.errors import StoreUnavailable, Unavailable
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.dashboard import add_dashboard
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.keys import KeyTable, new_key, write_table
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

NODES = ("n0", "n1")
ASK = {"messages": [{"role": "user", "content": "question " * 40}], "max_tokens": 8}
BUSY: Figures = {
    "engine_running": 3.0,
    "engine_waiting": 2.0,
    "engine_kv_leased_bytes": 5e8,
    "engine_kv_budget_bytes": 1e9,
    "engine_prefill_seconds_per_token": 0.0016,
    "replica_backlog_seconds": 2.5,
    "replica_seconds_per_output_token": 0.021,
    "engine_load_seconds_per_byte": {"ram": 4e-10, "disk": 3e-9},
    "speculation_steps_total": {"0": 30.0, "3": 70.0},
    "speculation_acceptance_ratio": {"1": 0.6, "2": 0.8},
    "speculation_cost_ratio": {"0": 1.0, "3": 1.5},
    "speculation_break_even_acceptance_ratio": {"3": 0.31},
}


class DeadBackend(ScriptedBackend):
    """Replicas that do not answer."""

    async def stats(self) -> dict[str, Figures]:
        raise Unavailable("none")


def no_members() -> tuple[str, ...]:
    raise StoreUnavailable("no node manager")


def dashboard_app(
    backend: ScriptedBackend,
    settings: Settings | None = None,
    members: Callable[[], tuple[str, ...]] = lambda: NODES,
) -> FastAPI:
    service = scripted_service(backend, settings or Settings(), ManualClock())
    metrics = ServiceMetrics()
    shards = SimulatedShards(NODES, ManualClock(), np.random.default_rng(0))
    app = create_app(service, metrics)
    cache = CacheApi(service, metrics, StoreAdmin(shards, members, ManualClock()))
    add_dashboard(app, service, metrics, cache)
    return app


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")


async def shown(http: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    response = await http.get("/dashboard/data", headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_an_empty_service_has_empty_figures() -> None:
    async with client(dashboard_app(ScriptedBackend())) as http:
        data = await shown(http)

    assert data["recent"] == []
    assert data["ttft"]["cold"] == {"count": 0, "p50_ms": 0.0, "p95_ms": 0.0}
    assert set(data["shards"]) == set(NODES)
    assert set(data["replicas"]) == {"scripted"}
    assert data["missing"] == []


async def test_requests_are_shown_newest_first_with_their_plans() -> None:
    async with client(dashboard_app(ScriptedBackend())) as http:
        await http.post("/v1/chat/completions", json=ASK)
        await http.post("/v1/chat/completions", json=ASK)
        await http.post("/v1/chat/completions", json=ASK | {"reuse": "off"})
        data = await shown(http)

    off, warm, cold = data["recent"]
    assert (off["reuse"], warm["reuse"]) == ("off", "exact")
    assert cold["plan"]["ram"] == 0
    assert cold["plan"]["computed"] == sum(warm["plan"].values())
    assert warm["plan"]["ram"] > warm["plan"]["computed"]
    assert [line["warm"] for line in (off, warm, cold)] == [False, True, False]
    assert (data["ttft"]["cold"]["count"], data["ttft"]["warm"]["count"]) == (2, 1)
    by_reuse = {
        (sample["labels"]["reuse"], sample["labels"]["source"]): sample["value"]
        for sample in data["counters"]["rakv_prompt_tokens"]
    }
    assert by_reuse["exact", "ram"] == warm["plan"]["ram"]


async def test_what_does_not_answer_is_named_and_the_rest_is_shown() -> None:
    async with client(dashboard_app(DeadBackend(), members=no_members)) as http:
        data = await shown(http)

    assert data["missing"] == ["replicas", "shards"]
    assert data["replicas"] == data["shards"] == {}


async def test_the_data_need_the_admin_scope_and_the_page_needs_none(tmp_path: Path) -> None:
    made = {name: new_key(name, admin=name == "root") for name in ("alpha", "root")}
    write_table(tmp_path / "keys.yaml", KeyTable({entry.id: entry for _, entry in made.values()}))
    settings = Settings(api_keys_file=tmp_path / "keys.yaml")
    async with client(dashboard_app(ScriptedBackend(), settings)) as http:
        bearer = {name: {"Authorization": f"Bearer {key}"} for name, (key, _) in made.items()}
        statuses = [
            (await http.get("/dashboard/data", headers=headers)).status_code
            for headers in ({}, bearer["alpha"], bearer["root"])
        ]
        page = await http.get("/dashboard")

    assert statuses == [401, 403, 200]
    assert page.status_code == 200
    assert "scripted" not in page.text


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with client(dashboard_app(ScriptedBackend())) as http:
        page = await http.get("/dashboard")

    assert not re.search(r"""(src|href)=["'](?!#)|url\(|@import|https?://""", page.text)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def rendered(url: str, folder: Path) -> str:
    """The page's DOM after it has fetched its data; a picture of it is kept in ``folder``."""
    flags = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000",
        "--window-size=1280,1400",
    ]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM or "", *flags, f"--screenshot={folder / 'page.png'}", "--dump-dom", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert (folder / "page.png").stat().st_size > 10_000
    return re.sub(r"<script>.*?</script>|<style>.*?</style>", "", done.stdout, flags=re.DOTALL)


def serve_and_render(app: FastAPI, folder: Path, asks: int = 0) -> str:
    async def build() -> FastAPI:
        return app

    with http_server(build) as url:
        for _ in range(asks):
            httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60).raise_for_status()
        return rendered(f"{url}/dashboard", folder)


@browser
def test_a_browser_shows_an_empty_service(tmp_path: Path) -> None:
    page = serve_and_render(dashboard_app(ScriptedBackend()), tmp_path)

    assert page.count("No request yet.") == 2
    assert 'class="alert"' not in page


@browser
def test_a_browser_shows_a_busy_service(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    backend.figures |= BUSY

    page = serve_and_render(dashboard_app(backend), tmp_path, asks=3)

    for text in ("2.50 s", "K=3", "31%", "70%", "1.50×", "n0", "chat"):
        assert text in page
    assert 'class="good"' in page
    for part in ('scope="col"', 'scope="row"', "<caption>", 'aria-label="hit rate of exact"'):
        assert part in page


@browser
def test_a_browser_says_what_fails(tmp_path: Path) -> None:
    page = serve_and_render(dashboard_app(DeadBackend(), members=no_members), tmp_path)

    assert "No replica answers. The shards do not answer." in page
    assert 'class="alert"' in page
