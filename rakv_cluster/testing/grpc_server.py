"""The gRPC surface behind a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.grpc_server import GrpcServer
from rakv_cluster.serving.grpc_service import GrpcSurface
from rakv_cluster.serving.service import Service
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.one_replica import OneReplica

_TIMEOUT_S = 60.0


@contextmanager
def grpc_server(build: Callable[[], Service], admin: StoreAdmin) -> Iterator[str]:
    """Serve what ``build`` makes on a free loopback port while the context lasts; its target.

    ``build`` runs in the server's event loop. Raises ``TimeoutError`` if it does not start.
    """
    started = threading.Event()
    ports: list[int] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        service, metrics = build(), ServiceMetrics()
        surface = GrpcSurface(service, metrics, CacheApi(service, metrics, admin), OneReplica())
        server = await GrpcServer.start(surface, service.settings, 0)
        ports.append(server.port)
        started.set()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="grpc-server")
    thread.start()
    try:
        if not started.wait(_TIMEOUT_S):
            raise TimeoutError("the server did not start")
        yield f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_TIMEOUT_S)
        loop.close()
