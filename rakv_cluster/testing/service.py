"""A whole service in this process without Ray: real sockets, real engine, usually a tiny model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import uvicorn

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.config import Settings
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.serving.backend import Backend, Failover
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.replica import Replica
from rakv_cluster.serving.service import Service
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.telemetry import ServiceMetrics

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LocalService:
    """A running one; ``replica`` is the engine's side, ``url`` where it answers."""

    url: str
    replica: Replica


StartLocal = Callable[..., LocalService]
"""A fixture's type: start a service with these settings."""


@contextmanager
def local_service(
    model: LoadedModel, store: ChunkStore, settings: Settings, *, seed: int = 0
) -> Iterator[LocalService]:
    """Serve ``model`` on a free loopback port while the context lasts. Closes ``store``.

    ``seed`` fixes the seeds drawn for requests that send none.
    """
    clock = SystemClock()
    replica = Replica(model, store, settings, clock)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            build = _Build(model, replica, settings, clock, Random(seed))
            with _in_thread(build, listener):
                port = listener.getsockname()[1]
                yield LocalService(f"http://127.0.0.1:{port}", replica)
    finally:
        replica.close()


@dataclass(frozen=True, slots=True)
class _Build:
    """What the server's thread needs to make the application in its own event loop."""

    model: LoadedModel
    backend: Backend
    settings: Settings
    clock: Clock
    seeds: Random

    async def server(self) -> uvicorn.Server:
        metrics = ServiceMetrics()
        backend = Failover(self.backend, self.clock, metrics)
        service = Service(
            settings=self.settings,
            backend=backend,
            card=await backend.describe(),
            renderer=PromptRenderer(self.model.tokenizer),
            cuts=CutTable.from_tokenizer(self.model.tokenizer),
            clock=self.clock,
            seeds=self.seeds,
        )
        app = create_app(service, metrics)
        return uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))


@contextmanager
def _in_thread(build: _Build, listener: socket.socket) -> Iterator[None]:
    started = threading.Event()
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        server = await build.server()
        servers.append(server)
        started.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="local-service")
    thread.start()
    try:
        if not started.wait(_START_TIMEOUT_S):
            raise TimeoutError("the local service did not start")
        yield
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(_START_TIMEOUT_S)
