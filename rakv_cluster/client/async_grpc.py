"""The client over gRPC for asyncio: :mod:`rakv_cluster.client.grpc` with every method awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import Any, TypeVar

import grpc
import grpc.aio
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


class AsyncGrpcStream:
    """:class:`GrpcStream` for asyncio; ``await stream.answer()`` gives the whole answer."""

    def __init__(self, call: Any, builder: GrpcAnswerBuilder) -> None:
        self._call = call
        self._builder = builder
        self._pieces = self._read()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def answer(self) -> Answer:
        """The whole answer; reads what has not been read yet."""
        async for _ in self._pieces:
            pass
        return self._builder.finish()

    async def aclose(self) -> None:
        """Leave; the server cancels what it has not generated yet."""
        self._call.cancel()
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[str, None]:
        with translated():
            async for event in self._call:
                if piece := self._builder.feed(event):
                    yield piece


class AsyncGrpcClient:
    """:class:`GrpcClient` for asyncio: the same methods, awaited. Belongs to one event loop."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: RetryPolicy = DEFAULT_RETRIES,
        clock: Clock = SYSTEM_CLOCK,
        credentials: grpc.ChannelCredentials | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._channel = (
            grpc.aio.secure_channel(target, credentials)
            if credentials
            else grpc.aio.insecure_channel(target)
        )
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._timeout_s = timeout_s
        self._retries = retries
        self._clock = clock
        self._random = Random()
        self._sleep = sleep
        self._calls = {method.name: self._callable(method) for method in methods()}

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The answer to a conversation; a text alone is the user's message."""
        return await self._whole(generate_request(chat_input(messages, documents), options))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> AsyncGrpcStream:
        """As :meth:`chat`, piece by piece; never tried again."""
        return self._open(generate_request(chat_input(messages, documents), options))

    async def complete(
        self, prompt: str, *, documents: Sequence[Document] = (), **options: Unpack[Options]
    ) -> Answer:
        """What follows ``prompt``; no chat template."""
        return await self._whole(generate_request(prompt_input(prompt, documents), options))

    async def explain_route(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> generation.ExplainRouteResponse:
        """Where a request would go now, and why; nothing is generated."""
        request = generate_request(chat_input(messages, documents), options)
        answer: generation.ExplainRouteResponse = await self._unary(
            "ExplainRoute", generation.ExplainRouteRequest(request=request)
        )
        return answer

    async def warm(
        self, messages: str | Sequence[Message], *, documents: Sequence[Document] = ()
    ) -> cache.WarmResponse:
        """Compute and store the KV of a conversation, above all that of its documents."""
        answer: cache.WarmResponse = await self._unary(
            "Warm", cache.WarmRequest(input=chat_input(messages, documents))
        )
        return answer

    async def lookup(
        self, messages: str | Sequence[Message], *, documents: Sequence[Document] = ()
    ) -> cache.LookupResponse:
        """Which of a conversation's chunks are on which nodes' disks."""
        answer: cache.LookupResponse = await self._unary(
            "Lookup", cache.LookupRequest(input=chat_input(messages, documents))
        )
        return answer

    async def pin(
        self,
        messages: str | Sequence[Message],
        *,
        owner: str,
        ttl_s: float,
        documents: Sequence[Document] = (),
    ) -> cache.PinResponse:
        """Keep a conversation's chunks from eviction; needs the admin scope."""
        given = chat_input(messages, documents)
        answer: cache.PinResponse = await self._unary(
            "Pin", cache.PinRequest(input=given, owner=owner, ttl_s=ttl_s)
        )
        return answer

    async def unpin(
        self,
        messages: str | Sequence[Message],
        *,
        owner: str,
        documents: Sequence[Document] = (),
    ) -> cache.UnpinResponse:
        """End an owner's pins; needs the admin scope."""
        given = chat_input(messages, documents)
        answer: cache.UnpinResponse = await self._unary(
            "Unpin", cache.UnpinRequest(input=given, owner=owner)
        )
        return answer

    async def evict(
        self, messages: str | Sequence[Message], *, documents: Sequence[Document] = ()
    ) -> cache.EvictResponse:
        """Remove a conversation's chunks from all disks and replicas; needs the admin scope."""
        answer: cache.EvictResponse = await self._unary(
            "Evict", cache.EvictRequest(input=chat_input(messages, documents))
        )
        return answer

    async def stats(self) -> cache.StatsResponse:
        """Sizes and counters of every node's shard; needs the admin scope."""
        answer: cache.StatsResponse = await self._unary("Stats", cache.StatsRequest())
        return answer

    async def aclose(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def _callable(self, method: Method) -> Any:
        make = self._channel.unary_stream if method.streams else self._channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )

    async def _whole(self, request: generation.GenerateRequest) -> Answer:
        async def ask() -> Answer:
            async with self._open(request) as stream:
                return await stream.answer()

        return await self._retried(ask)

    def _open(self, request: generation.GenerateRequest) -> AsyncGrpcStream:
        started_s = self._clock.monotonic_s()
        call = self._calls["GenerateStream"](
            request, timeout=self._timeout_s, metadata=self._metadata
        )
        return AsyncGrpcStream(call, GrpcAnswerBuilder(self._clock, started_s))

    async def _unary(self, name: str, request: Proto) -> Any:
        async def ask() -> Any:
            with translated():
                return await self._calls[name](
                    request, timeout=self._timeout_s, metadata=self._metadata
                )

        return await self._retried(ask)

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await self._retries.run_async(attempt, self._random, self._sleep)
