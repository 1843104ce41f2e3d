"""Services as their descriptors say: which methods there are and what they take and give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rakv_cluster.rpc.v1 import cache_pb2, generation_pb2

SERVICES: tuple[ServiceDescriptor, ...] = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"],
    cache_pb2.DESCRIPTOR.services_by_name["Cache"],
)


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure."""

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    streams: bool

    @property
    def path(self) -> str:
        """As it is called on the wire."""
        return f"/{self.service}/{self.name}"


def methods() -> Iterator[Method]:
    """All methods of all services."""
    for service in SERVICES:
        for method in service.methods:
            yield _method(service, method)


def _method(service: ServiceDescriptor, method: MethodDescriptor) -> Method:
    return Method(
        service.full_name,
        method.name,
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        method.server_streaming,
    )
