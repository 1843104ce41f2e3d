"""The client over HTTP for plain code; :mod:`rakv_cluster.client.async_http` has its twin.

    with Client("http://127.0.0.1:8000") as client:
        answer = client.chat("Who wrote it?", documents=[Document(text, id="report")])
        print(answer.text, answer.cached_tokens)
        for piece in client.stream_chat("And when?", documents=[Document(text, id="report")]):
            print(piece, end="")

Errors are those of :mod:`rakv_cluster.errors`, as the server raised them; no connection is
:class:`Unavailable`, silence for ``timeout_s`` is :class:`DeadlineExceeded`. Answers travel as
streams in any case, so leaving one early cancels the work within one step of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from random import Random
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


class Stream:
    """An answer as it comes: iterate for its pieces of text, then ask for :attr:`answer`."""

    def __init__(self, response: httpx.Response, builder: AnswerBuilder) -> None:
        self._response = response
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
        self._pieces.close()
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _read(self) -> Generator[str, None, None]:
        with translated(self._response.url), closing(self._response):
            lines = EventLines()
            for data in self._response.iter_bytes():
                for line in lines.push(data):
                    if piece := self._builder.feed(line):
                        yield piece
        self._builder.finish()


class Client:
    """Asks one service. Safe to share between threads; close it, or use it in a ``with``."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: RetryPolicy = DEFAULT_RETRIES,
        clock: Clock = SYSTEM_CLOCK,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http = httpx.Client(
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

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The answer to a conversation; a text alone is the user's message."""
        return self._whole(CHAT_PATH, chat_body(messages, documents, options))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        *,
        documents: Sequence[Document] = (),
        **options: Unpack[Options],
    ) -> Stream:
        """As :meth:`chat`, piece by piece. Not tried again once the first piece is there."""
        body = chat_body(messages, documents, options)
        return self._retried(lambda: self._open(CHAT_PATH, body))

    def complete(
        self, prompt: str, *, documents: Sequence[Document] = (), **options: Unpack[Options]
    ) -> Answer:
        """What follows ``prompt``; no chat template."""
        return self._whole(COMPLETION_PATH, completion_body(prompt, documents, options))

    def stream_complete(
        self, prompt: str, *, documents: Sequence[Document] = (), **options: Unpack[Options]
    ) -> Stream:
        """As :meth:`complete`, piece by piece."""
        body = completion_body(prompt, documents, options)
        return self._retried(lambda: self._open(COMPLETION_PATH, body))

    def models(self) -> tuple[str, ...]:
        """Names of the models that the service holds."""
        return self._retried(lambda: model_names(self._get("/v1/models")))

    def ready(self) -> bool:
        """Whether a replica would take a request now; asked once."""
        try:
            self._get("/readyz")
        except Unavailable:
            return False
        return True

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        def ask() -> Answer:
            with self._open(path, body) as stream:
                return stream.answer

        return self._retried(ask)

    def _open(self, path: str, body: dict[str, Any]) -> Stream:
        builder = AnswerBuilder(self._clock, self._clock.monotonic_s())
        with translated(self._http.base_url):
            request = posted(self._http, path, body)
            response = self._http.send(request, stream=True)
            if response.is_error:
                response.read()
        raise_for_error(response)
        return Stream(response, builder)

    def _get(self, path: str) -> httpx.Response:
        with translated(self._http.base_url):
            response = self._http.get(path)
        raise_for_error(response)
        return response

    def _retried(self, attempt: Callable[[], T]) -> T:
        return self._retries.run(attempt, self._random, self._sleep)
