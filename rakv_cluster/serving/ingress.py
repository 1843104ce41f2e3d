"""The Ingress deployment: HTTP, tokenizer and text; no model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import SystemRandom

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.config import Settings
from rakv_cluster.errors import Unavailable
from rakv_cluster.logs import configure_logs
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer
from rakv_cluster.routing.directory_follower import follow_directory
from rakv_cluster.routing.locations import Holders
from rakv_cluster.routing.output_length import OutputLengths
from rakv_cluster.serving.admin_api import add_cache_routes
from rakv_cluster.serving.audit import AuditedBackend
from rakv_cluster.serving.backend import Failover
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.dashboard import add_dashboard
from rakv_cluster.serving.document_api import add_document_routes
from rakv_cluster.serving.grpc_server import GrpcServer
from rakv_cluster.serving.grpc_service import GrpcSurface
from rakv_cluster.serving.handles import HandleBackend, nowhere
from rakv_cluster.serving.hedging import HedgePolicy
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.route_api import add_route_explanation
from rakv_cluster.serving.service import Service
from rakv_cluster.serving.shared_documents import SharedDocuments
from rakv_cluster.serving.stores import cluster_store_settings, open_admin
from rakv_cluster.serving.tracing import open_tracer
from rakv_cluster.telemetry import ServiceMetrics

log = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """One per node; starts serving once a replica has described its model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor that is a coroutine
        self, settings: Settings, worker: DeploymentHandle
    ) -> None:
        configure_logs(settings.log_format)
        clock = SystemClock()
        self._metrics = ServiceMetrics(serve.get_replica_context().replica_id.unique_id)
        holders = await asyncio.to_thread(_follow_directory, settings, clock)
        lengths = OutputLengths()
        self._replicas = HandleBackend(
            worker,
            self._metrics,
            clock,
            HedgePolicy(settings.hedge_share),
            lengths=lengths,
            holders=holders,
        )
        failover = Failover(self._replicas, clock, self._metrics)
        backend = AuditedBackend(failover, self._metrics)
        source = resolve(settings.model, settings.cache_path)
        tokenizer = await asyncio.to_thread(load_tokenizer, source)
        documents = _shared_documents(settings)
        # While replicas load the model: none of these makes the start longer.
        renderer, cuts, card, _ = await asyncio.gather(
            asyncio.to_thread(PromptRenderer, tokenizer),
            asyncio.to_thread(CutTable.from_tokenizer, tokenizer),
            backend.describe(),
            _started(documents),
        )
        self._service = Service(
            settings=settings,
            backend=backend,
            card=card,
            renderer=renderer,
            cuts=cuts,
            clock=clock,
            seeds=SystemRandom(),
            documents=lambda _: documents,
            tracer=open_tracer(settings.otlp_endpoint, "rakv"),
            on_disk=lambda key: bool(holders([key])),
            ended=lengths.observe,
        )
        self._cache = CacheApi(self._service, self._metrics, open_admin(settings, clock))
        self._grpc: list[GrpcServer] = []
        if settings.grpc_port:
            surface = GrpcSurface(self._service, self._metrics, self._cache, self._replicas)
            self._grpc.append(await GrpcServer.start(surface, settings, settings.grpc_port))

    async def __del__(self) -> None:
        # Serve awaits this when it stops a replica; a failed __init__ left nothing to stop.
        for server in getattr(self, "_grpc", ()):
            await server.stop()
        if hasattr(self, "_service"):
            await asyncio.to_thread(self._service.tracer.close)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._service, self._metrics, ids_echoed=True)  # by Serve's proxy
        add_route_explanation(app, self._service, self._replicas)
        add_cache_routes(app, self._cache, self._service.settings)
        add_document_routes(app, self._service, self._cache)
        add_dashboard(app, self._service, self._metrics, self._cache)
        return app


def _shared_documents(settings: Settings) -> SharedDocuments:
    store = cluster_store_settings(settings)
    return SharedDocuments(
        int(settings.documents_budget_bytes), service=store.service, namespace=store.namespace
    )


async def _started(documents: SharedDocuments) -> None:
    """The registry answers, or the service starts without: it is asked again with each request."""
    try:
        await documents.start()
    except Unavailable as error:
        log.warning("the service starts all the same: %s", error.message)


def _follow_directory(settings: Settings, clock: Clock) -> Callable[[Sequence[bytes]], Holders]:
    """Which nodes hold what on disk, from now on."""
    if settings.store != "tiered":
        return nowhere
    return follow_directory(cluster_store_settings(settings), clock).holders
