"""The client over HTTP for asyncio: :mod:`rakv_cluster.client.http` with every method awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from random import Random
from types import TracebackType
from typing import Any, TypeVar

import httpx
from typing_extensions import Self, Unpack

from rakv_cluster.client.answers import Answer, AnswerBuilder, EventLines
from rakv_cluster.client.requests import (
    CHAT_PATH,
    COMPLETION_PATH,
    Document,
    Message,
    Options,
    chat_body,
    completion_body,
)
from rakv_cluster.client.retries import RetryPolicy
from rakv_cluster.client.transport import (
    CONNECTIONS,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    SYSTEM_CLOCK,
    headers,
    model_names,
    posted,
    raise_for_error,
    timeout,
    translated,
)
from rakv_cluster.clock import Clock
from rakv_cluster.errors import Unavailable

T = TypeVar("T")


class AsyncStream:
    """:class:`Stream` for asyncio; ``await stream.answer()`` gives the whole answer."""

    def __init__(self, response: httpx.Response, builder: AnswerBuilder) -> None:
        self._response = response
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
        await self._pieces.aclose()
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[str, None]:
        with translated(self._response.url):
            async with aclosing(self._response):
                lines = EventLines()
                async for data in self._response.aiter_bytes():
                    for line in lines.push(data):
                        if piece := self._builder.feed(line):
                            yield piece
        self._builder.finish()


class AsyncClient:
    """:class:`Client` for asyncio: the same methods, awaited."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: RetryPolicy = DEFAULT_RETRIES,
        clock: Clock = SYSTEM_CLOCK,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers(api_key),
            timeout=timeout(timeout_s),
            limits=CONNECTIONS,
            transport=transport,
        )
        self._retries = retries
        self._clock = clock
        self._random = Random()
        self._sleep = sleep

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """See :meth:`Client.chat`."""
        return await self._whole(CHAT_PATH, chat_body(messages, documents, options))

    async def stream_chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> AsyncStream:
        """See :meth:`Client.stream_chat`."""
        body = chat_body(messages, documents, options)
        return await self._retried(lambda: self._open(CHAT_PATH, body))

    async def complete(
        self, prompt: str, *, documents: Sequence[Document] = (), **options: Unpack[Options]
    ) -> Answer:
        """See :meth:`Client.complete`."""
        return await self._whole(COMPLETION_PATH, completion_body(prompt, documents, options))

    async def stream_complete(
        self, prompt: str, *, documents: Sequence[Document] = (), **options: Unpack[Options]
    ) -> AsyncStream:
        """See :meth:`Client.stream_complete`."""
        body = completion_body(prompt, documents, options)
        return await self._retried(lambda: self._open(COMPLETION_PATH, body))

    async def models(self) -> tuple[str, ...]:
        """See :meth:`Client.models`."""
        return model_names(await self._retried(lambda: self._get("/v1/models")))

    async def ready(self) -> bool:
        """See :meth:`Client.ready`."""
        try:
            await self._get("/readyz")
        except Unavailable:
            return False
        return True

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        async def ask() -> Answer:
            async with await self._open(path, body) as stream:
                return await stream.answer()

        return await self._retried(ask)

    async def _open(self, path: str, body: dict[str, Any]) -> AsyncStream:
        builder = AnswerBuilder(self._clock, self._clock.monotonic_s())
        with translated(self._http.base_url):
            request = posted(self._http, path, body)
            response = await self._http.send(request, stream=True)
            if response.is_error:
                await response.aread()
        raise_for_error(response)
        return AsyncStream(response, builder)

    async def _get(self, path: str) -> httpx.Response:
        with translated(self._http.base_url):
            response = await self._http.get(path)
        raise_for_error(response)
        return response

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await self._retries.run_async(attempt, self._random, self._sleep)
