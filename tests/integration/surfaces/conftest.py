"""One cluster for the whole folder, with keys for every kind of tenant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rakv_cluster.cli.local_service import free_port
from rakv_cluster.serving.keys import KeyTable, TenantLimits, new_key, write_table
from rakv_cluster.testing import scrapes
from rakv_cluster.testing.processes import served
from rakv_cluster.testing.surfaces import GrpcSurface, HttpSurface, Surface
from rakv_cluster.testing.tiny_models import (
    TOOLS_TEMPLATE,
    save_tiny_model,
    tiny_llama,
    tiny_tokenizer,
)

MAX_RUNNING, MAX_WAITING = 8, 32
BODY_TIMEOUT_S = 10.0
LEAST_CHUNK_TOKENS = 64
# A tenant for each surface, so that neither uses up the other's limit.
LIMITS = {
    "few": TenantLimits(requests_per_minute=2),
    "wordy": TenantLimits(tokens_per_minute=20),
    "single": TenantLimits(concurrent=1),
}
TENANTS = ["alpha", "beta", "root"] + [f"{n}-{s}" for n in LIMITS for s in ("http", "grpc")]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where it answers, and keys by tenant; ``root`` has the admin scope."""

    url: str
    target: str
    keys: dict[str, str]
    log: Path
    pid: int

    def surface(self, kind: str, tenant: str = "alpha", *, request_id: str = "") -> Surface:
        """One surface, as ``tenant`` sees it; an unknown tenant has no key."""
        key = self.keys.get(tenant, "")
        if kind == "http":
            return HttpSurface(self.url, key, request_id=request_id)
        return GrpcSurface(self.target, key, request_id=request_id)

    def log_files(self) -> list[Path]:
        """What its processes have logged: Ray names the session's folder after the first one."""
        folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
        return sorted(folder.glob(f"session_*_{self.pid}/logs/worker-*"))

    def metrics(self) -> str:
        """A scrape."""
        headers = {"Authorization": f"Bearer {self.keys['root']}"}
        return httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text

    def running(self) -> float:
        """Requests that the engine works on."""
        return scrapes.running(self.metrics)

    def cancelled(self) -> float:
        """Requests that the engine ended because nobody waited for them any more."""
        return scrapes.cancelled(self.metrics)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("surfaces")
    tokenizer = tiny_tokenizer(TOOLS_TEMPLATE)
    model = save_tiny_model(folder / "tiny", tiny_llama(layers=4), tokenizer)
    made = {name: new_key(name, admin=name == "root") for name in TENANTS}
    limits = {name: LIMITS[name.split("-")[0]] for name in TENANTS if "-" in name}
    write_table(folder / "keys", KeyTable({e.id: e for _, e in made.values()}, limits))
    port = free_port()
    flags = {
        "model": str(model),
        "store-dir": str(folder / "store"),
        # Whether loading pays off is a matter of time for a model this small: not priced here.
        "set": "price_loads=false",
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAKV_GRPC_PORT", str(port))
        environment.setenv("RAKV_API_KEYS_FILE", str(folder / "keys"))
        environment.setenv("RAKV_LOG_FORMAT", "json")
        environment.setenv("RAKV_BODY_LIMIT_BYTES", "1MiB")
        environment.setenv("RAKV_BODY_TIMEOUT_S", str(BODY_TIMEOUT_S))
        environment.setenv("RAKV_MAX_RUNNING", str(MAX_RUNNING))
        environment.setenv("RAKV_MAX_WAITING", str(MAX_WAITING))
        with served(flags, folder / "serve.log") as running:
            keys = {name: key for name, (key, _) in made.items()}
            log = folder / "serve.log"
            yield Cluster(running.base_url, f"127.0.0.1:{port}", keys, log, running.pid)


@pytest.fixture(scope="package", params=["http", "grpc"])
def surface(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Surface]:
    """The tenant alpha's view."""
    with closing(cluster.surface(request.param)) as surface:
        yield surface


@pytest.fixture(scope="package")
def root(surface: Surface, cluster: Cluster) -> Iterator[Surface]:
    """An administrator's view of the same surface."""
    with closing(cluster.surface(surface.name, "root")) as admin:
        yield admin


@pytest.fixture
def views(cluster: Cluster) -> Iterator[ExitStack]:
    """Closes further views of one test."""
    with ExitStack() as stack:
        yield stack
