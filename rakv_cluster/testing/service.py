"""A whole service in this process without Ray: real sockets, real engine, usually a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from fastapi import FastAPI

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.config import Settings
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.serving.audit import AuditedBackend
from rakv_cluster.serving.backend import Backend, Failover
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.replica import Replica
from rakv_cluster.serving.service import Service
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.http_server import http_server


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
        build = _Build(model, replica, settings, clock, Random(seed))
        with http_server(build.app) as url:
            yield LocalService(url, replica)
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

    async def app(self) -> FastAPI:
        metrics = ServiceMetrics()
        backend = AuditedBackend(Failover(self.backend, self.clock, metrics), metrics)
        service = Service(
            settings=self.settings,
            backend=backend,
            card=await backend.describe(),
            renderer=PromptRenderer(self.model.tokenizer),
            cuts=CutTable.from_tokenizer(self.model.tokenizer),
            clock=self.clock,
            seeds=self.seeds,
        )
        return create_app(service, metrics)
