"""The gRPC server of one ingress: its port, the standard health and reflection services, its end.

Its own server instead of Serve's gRPC proxy, which binds every address and answers with tracebacks.
"""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from rakv_cluster.config import Settings
from rakv_cluster.errors import ConfigError
from rakv_cluster.rpc.calls import SERVICES
from rakv_cluster.serving.grpc_service import GrpcSurface
from rakv_cluster.serving.tls import tls_files

_CALLS_AT_ONCE = 1024
_GRACE_S = 5.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


class GrpcServer:
    """A started server; belongs to the event loop that started it."""

    def __init__(self, server: grpc.aio.Server, health_service: health.HealthServicer, port: int):
        self.port = port
        self._server = server
        self._health = health_service

    @classmethod
    async def start(cls, surface: GrpcSurface, settings: Settings, port: int) -> GrpcServer:
        """Listen on ``settings.grpc_host``; ``port`` 0 takes a free one.

        Raises :class:`ConfigError` if the port cannot be bound.
        """
        limit_bytes = int(settings.body_limit_bytes)
        server = grpc.aio.server(
            maximum_concurrent_rpcs=_CALLS_AT_ONCE,
            options=[
                ("grpc.max_receive_message_length", limit_bytes),
                # Two services must not share a port unnoticed.
                ("grpc.so_reuseport", 0),
            ],
        )
        server.add_generic_rpc_handlers(surface.handlers())
        names = [service.full_name for service in SERVICES]
        health_service = health.HealthServicer()
        for name in ["", *names]:
            await health_service.set(name, _SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        shown = [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        reflection.enable_server_reflection([*shown, reflection.SERVICE_NAME], server)
        address = f"{_bracketed(settings.grpc_host)}:{port}"
        try:
            bound = _bind(server, address, settings)
        except RuntimeError as error:
            raise ConfigError(f"cannot bind {address} for gRPC", field="grpc_port") from error
        await server.start()
        return cls(server, health_service, bound)

    async def stop(self) -> None:
        """Say so to health checks, take no new calls, give running ones a few seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_GRACE_S)


def _bind(server: grpc.aio.Server, address: str, settings: Settings) -> int:
    if not settings.has_tls:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials([tls_files(settings)])
    return server.add_secure_port(address, credentials)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
