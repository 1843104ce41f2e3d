"""The client over gRPC: the methods of :class:`~rakv_cluster.client.http.Client`, and the cache's.

    with GrpcClient("127.0.0.1:8001") as client:
        report = Document(text, id="report")
        client.warm("Who wrote it?", documents=[report])
        answer = client.chat("Who wrote it?", documents=[report])

Errors are those of :mod:`rakv_cluster.errors`, as the server raised them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message as Proto
from typing_extensions import Self, Unpack

from rakv_cluster.client.answers import Answer
from rakv_cluster.client.grpc_calls import (
    DEFAULT_TARGET,
    GrpcAnswerBuilder,
    chat_input,
    generate_request,
    prompt_input,
    translated,
)
from rakv_cluster.client.requests import Document, Message, Options
from rakv_cluster.client.retries import RetryPolicy
from rakv_cluster.client.transport import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, SYSTEM_CLOCK
from rakv_cluster.clock import Clock
from rakv_cluster.rpc.calls import Method, methods
from rakv_cluster.rpc.v1 import cache_pb2 as cache
from rakv_cluster.rpc.v1 import generation_pb2 as generation

T = TypeVar("T")


class GrpcStream:
    """An answer as it comes: iterate for its pieces of text, then ask for :attr:`answer`."""

    def __init__(self, call: Any, builder: GrpcAnswerBuilder) -> None:
        self._call = call
        self._builder = builder
        self._pieces = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        """The whole answer; reads what has not been read yet."""
        for _ in self._pieces:
            pass
        return self._builder.finish()

    def close(self) -> None:
        """Leave; the server cancels what it has not generated yet."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _read(self) -> Generator[str, None, None]:
        with translated():
            for event in self._call:
                if piece := self._builder.feed(event):
                    yield piece


class GrpcClient:
    """Asks one service over gRPC. Safe to share between threads; close it, or use it in a ``with``.

    ``timeout_s`` is the deadline of each call. Operations on the cache answer with the messages of
    protos/rakv/v1/cache.proto, which documents them.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: RetryPolicy = DEFAULT_RETRIES,
        clock: Clock = SYSTEM_CLOCK,
        credentials: grpc.ChannelCredentials | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._channel = (
            grpc.secure_channel(target, credentials)
            if credentials
            else grpc.insecure_channel(target)
        )
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._timeout_s = timeout_s
        self._retries = retries
        self._clock = clock
        self._random = Random()
        self._sleep = sleep
        self._calls = {method.name: self._callable(method) for method in methods()}

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The answer to a conversation; a text alone is the user's message."""
        return self._whole(generate_request(chat_input(messages, documents), options))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> GrpcStream:
        """As :meth:`chat`, piece by piece; never tried again."""
        return self._open(generate_request(chat_input(messages, documents), options))

    def complete(
        self, prompt: str, *, documents: Sequence[Document] = (), **options: Unpack[Options]
    ) -> Answer:
        """What follows ``prompt``; no chat template."""
        return self._whole(generate_request(prompt_input(prompt, documents), options))

    def explain_route(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> generation.ExplainRouteResponse:
        """Where a request would go now, and why; nothing is generated."""
        request = generate_request(chat_input(messages, documents), options)
        answer: generation.ExplainRouteResponse = self._unary(
            "ExplainRoute", generation.ExplainRouteRequest(request=request)
        )
        return answer

    def warm(
        self, messages: str | Sequence[Message], *, documents: Sequence[Document] = ()
    ) -> cache.WarmResponse:
        """Compute and store the KV of a conversation, above all that of its documents."""
        answer: cache.WarmResponse = self._unary(
            "Warm", cache.WarmRequest(input=chat_input(messages, documents))
        )
        return answer

    def lookup(
        self, messages: str | Sequence[Message], *, documents: Sequence[Document] = ()
    ) -> cache.LookupResponse:
        """Which of a conversation's chunks are on which nodes' disks."""
        answer: cache.LookupResponse = self._unary(
            "Lookup", cache.LookupRequest(input=chat_input(messages, documents))
        )
        return answer

    def pin(
        self,
        messages: str | Sequence[Message],
        *,
        owner: str,
        ttl_s: float,
        documents: Sequence[Document] = (),
    ) -> cache.PinResponse:
        """Keep a conversation's chunks from eviction; needs the admin scope."""
        given = chat_input(messages, documents)
        answer: cache.PinResponse = self._unary(
            "Pin", cache.PinRequest(input=given, owner=owner, ttl_s=ttl_s)
        )
        return answer

    def unpin(
        self,
        messages: str | Sequence[Message],
        *,
        owner: str,
        documents: Sequence[Document] = (),
    ) -> cache.UnpinResponse:
        """End an owner's pins; needs the admin scope."""
        given = chat_input(messages, documents)
        answer: cache.UnpinResponse = self._unary(
            "Unpin", cache.UnpinRequest(input=given, owner=owner)
        )
        return answer

    def evict(
        self, messages: str | Sequence[Message], *, documents: Sequence[Document] = ()
    ) -> cache.EvictResponse:
        """Remove a conversation's chunks from all disks and replicas; needs the admin scope."""
        answer: cache.EvictResponse = self._unary(
            "Evict", cache.EvictRequest(input=chat_input(messages, documents))
        )
        return answer

    def stats(self) -> cache.StatsResponse:
        """Sizes and counters of every node's shard; needs the admin scope."""
        answer: cache.StatsResponse = self._unary("Stats", cache.StatsRequest())
        return answer

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _callable(self, method: Method) -> Any:
        make = self._channel.unary_stream if method.streams else self._channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )

    def _whole(self, request: generation.GenerateRequest) -> Answer:
        def ask() -> Answer:
            with self._open(request) as stream:
                return stream.answer

        return self._retried(ask)

    def _open(self, request: generation.GenerateRequest) -> GrpcStream:
        started_s = self._clock.monotonic_s()
        call = self._calls["GenerateStream"](
            request, timeout=self._timeout_s, metadata=self._metadata
        )
        return GrpcStream(call, GrpcAnswerBuilder(self._clock, started_s))

    def _unary(self, name: str, request: Proto) -> Any:
        def ask() -> Any:
            with translated():
                return self._calls[name](request, timeout=self._timeout_s, metadata=self._metadata)

        return self._retried(ask)

    def _retried(self, attempt: Callable[[], T]) -> T:
        return self._retries.run(attempt, self._random, self._sleep)
