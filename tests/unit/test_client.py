"""The HTTP clients: against the real HTTP application, and against servers that misbehave.

Every test runs on both clients; the plain one is called in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from pydantic_core import to_json

from rakv_cluster import errors
from rakv_cluster.client import Answer, AsyncClient, Client, Document, Message, RetryPolicy
from rakv_cluster.client.answers import error_of
from rakv_cluster.config import Settings
from rakv_cluster.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RakvError,
    Unauthenticated,
    Unavailable,
)
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app

Handler = Callable[[httpx.Request], httpx.Response]
Ask = Callable[..., Awaitable[Answer]]


def event(content: str = "", finish: str | None = None, **extra: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **extra}).encode() + b"\n\n"


WHOLE = [event("Hel"), event("lo", "stop"), b"data: [DONE]\n\n"]


class Lines(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response body whose parts may be functions, called when their turn comes."""

    def __init__(self, *parts: bytes | Callable[[], None]) -> None:
        self._parts = parts
        self.closed = False

    def __iter__(self) -> Any:
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
            else:
                part()

    async def __aiter__(self) -> Any:
        for part in self:
            yield part

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class Bench:
    """One of the two clients over a handler; waits are recorded instead of waited."""

    def __init__(self, kind: str, handler: Handler, **options: Any) -> None:
        self.waits: list[float] = []
        self.kind = kind
        self.clock = ManualClock()
        shared = {
            "transport": httpx.MockTransport(handler), "clock": self.clock, **options
        }  # fmt: skip
        if kind == "plain":
            self._plain = Client("http://service", sleep=self.waits.append, **shared)
        else:
            self._async = AsyncClient("http://service", sleep=self._wait, **shared)

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def chat(self, *args: Any, **options: Any) -> Answer:
        if self.kind == "plain":
            return self._plain.chat(*args, **options)
        return await self._async.chat(*args, **options)

    async def pieces(self, *args: Any, **options: Any) -> tuple[list[str], Answer]:
        if self.kind == "plain":
            with self._plain.stream_chat(*args, **options) as stream:
                return list(stream), stream.answer
        async with await self._async.stream_chat(*args, **options) as stream:
            return [piece async for piece in stream], await stream.answer()

    async def first_piece(self) -> str:
        """Take one piece and leave."""
        if self.kind == "plain":
            with self._plain.stream_chat("q") as stream:
                return next(stream)
        async with await self._async.stream_chat("q") as stream:
            return await anext(stream)

    async def ready(self) -> bool:
        return self._plain.ready() if self.kind == "plain" else await self._async.ready()

    async def models(self) -> tuple[str, ...]:
        return self._plain.models() if self.kind == "plain" else await self._async.models()


@pytest.fixture(params=["plain", "async"])
def bench(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    return lambda handler, **options: Bench(request.param, handler, **options)


def served(*parts: bytes | Callable[[], None]) -> Handler:
    return lambda request: httpx.Response(200, stream=Lines(*parts))


async def test_times_the_first_piece_and_keeps_the_servers_accounts(
    bench: Callable[..., Bench],
) -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    rakv = {"tokens": {"ram": 7, "disk": 0, "computed": 2}}
    last = b"data: " + json.dumps({"choices": [], "usage": usage, "rakv": rakv}).encode()
    parts: list[bytes | Callable[[], None]] = [event("")]
    timed = bench(lambda request: httpx.Response(200, stream=Lines(*parts)))
    parts += [lambda: timed.clock.advance(0.5), event("Hel"), lambda: timed.clock.advance(2.0)]
    parts += [event("lo", "stop"), last + b"\n\n", b"data: [DONE]\n\n"]

    pieces, answer = await timed.pieces("q")

    assert pieces == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert (answer.ttft_s, answer.total_s) == (pytest.approx(0.5), pytest.approx(2.5))
    assert answer.tokens_per_s == pytest.approx(2.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 7, 5)
    assert answer.sources == {"ram": 7, "disk": 0, "computed": 2}


async def test_sends_what_was_asked_and_the_key(bench: Callable[..., Bench]) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=Lines(*WHOLE))

    await bench(handler, api_key="rakv_x_y").chat(
        [Message("system", "s"), Message("user", "u")],
        documents=[Document("text", "d1")],
        temperature=0,
    )

    assert seen[0].headers["authorization"] == "Bearer rakv_x_y"
    assert json.loads(seen[0].content) == {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "documents": [{"id": "d1", "text": "text"}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_what_says_not_now_is_tried_again(bench: Callable[..., Bench]) -> None:
    answers = [
        httpx.Response(503, json={"error": {"message": "starting", "code": "unavailable"}}),
        httpx.Response(429, headers={"Retry-After": "7"}, json={}),
        httpx.Response(200, stream=Lines(*WHOLE)),
    ]
    retrying = bench(lambda request: answers.pop(0))

    assert (await retrying.chat("q")).text == "Hello"
    assert 0.25 <= retrying.waits[0] <= 0.5
    assert retrying.waits[1] == 7.0


async def test_tries_end(bench: Callable[..., Bench]) -> None:
    refused = bench(
        lambda request: httpx.Response(503, json={}), retries=RetryPolicy(attempts=3, first_s=1.0)
    )

    with pytest.raises(Unavailable):
        await refused.chat("q")
    assert len(refused.waits) == 2


async def test_a_wait_that_is_too_long_is_the_callers_business(bench: Callable[..., Bench]) -> None:
    patient = bench(lambda request: httpx.Response(429, headers={"Retry-After": "3600"}, json={}))

    with pytest.raises(Overloaded) as caught:
        await patient.chat("q")
    assert caught.value.retry_after_s == 3600
    assert patient.waits == []


@pytest.mark.parametrize("status", [400, 401, 404, 408, 500, 501])
async def test_what_will_not_get_better_is_not_tried_again(
    status: int, bench: Callable[..., Bench]
) -> None:
    refused = bench(lambda request: httpx.Response(status, text="<html>"))

    with pytest.raises(RakvError, match=str(status)):
        await refused.chat("q")
    assert refused.waits == []


async def test_a_stream_that_breaks_off_is_asked_for_again_as_a_whole(
    bench: Callable[..., Bench],
) -> None:
    bodies = [Lines(event("Hal")), Lines(*WHOLE)]
    broken = bench(lambda request: httpx.Response(200, stream=bodies.pop(0)))

    assert (await broken.chat("q")).text == "Hello"


async def test_pieces_that_were_shown_are_never_asked_for_again(
    bench: Callable[..., Bench],
) -> None:
    broken = bench(served(event("Hal")))

    with pytest.raises(Unavailable, match="broke off"):
        await broken.pieces("q")
    assert broken.waits == []


async def test_an_error_inside_the_stream_is_raised_as_what_it_is(
    bench: Callable[..., Bench],
) -> None:
    body = {"error": {"message": "time is up", "code": "deadline_exceeded"}}
    failing = bench(served(event("Hal"), b"data: " + json.dumps(body).encode() + b"\n\n"))

    with pytest.raises(DeadlineExceeded, match="time is up"):
        await failing.chat("q")


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"choices": 5}', '{"choices": [{}]}', "null"])
async def test_what_is_no_event_is_an_error_of_ours(line: str, bench: Callable[..., Bench]) -> None:
    odd = bench(served(f"data: {line}\n\n".encode()))

    with pytest.raises(RakvError, match="not an event"):
        await odd.chat("q")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (httpx.ConnectError("refused"), Unavailable),
        (httpx.ConnectTimeout("slow"), Unavailable),
        (httpx.RemoteProtocolError("gone"), Unavailable),
        (httpx.ReadTimeout("silent"), DeadlineExceeded),
    ],
)
async def test_trouble_on_the_wire_is_an_error_of_ours(
    raised: Exception, kind: type[RakvError], bench: Callable[..., Bench]
) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise raised

    with pytest.raises(kind, match="http://service"):
        await bench(fail).chat("q")


async def test_what_else_ends_lines_elsewhere_is_text(bench: Callable[..., Bench]) -> None:
    text = "a\u2028b\u2029c\x85d"
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]
    sent = b"data: " + to_json({"choices": choices}) + b"\n\n"  # as the service writes it
    cut = sent.index("\u2028".encode()) + 1

    odd = bench(served(sent[:cut], sent[cut:], b"data: [DONE]\n\n"))

    assert (await odd.chat("q")).text == text


async def test_half_a_character_is_refused_as_the_service_would(
    bench: Callable[..., Bench],
) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        await bench(served(*WHOLE)).chat("half a pair: \ud83d")


async def test_a_number_that_json_has_not_is_refused(bench: Callable[..., Bench]) -> None:
    with pytest.raises(InvalidRequest):
        await bench(served(*WHOLE)).chat("q", temperature=float("nan"))


async def test_a_document_can_be_named_by_its_id_alone(bench: Callable[..., Bench]) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=Lines(*WHOLE))

    await bench(handler).chat("q", documents=[Document("", "report")])

    assert json.loads(seen[0].content)["documents"] == [{"id": "report"}]


async def test_leaving_early_closes_the_response(bench: Callable[..., Bench]) -> None:
    body = Lines(event("Hel"), event("lo"))

    assert await bench(lambda request: httpx.Response(200, stream=body)).first_piece() == "Hel"
    assert body.closed


async def test_ready_and_models(bench: Callable[..., Bench]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(503, json={})
        return httpx.Response(200, json={"data": [{"id": "m1"}, {"id": "m2"}]})

    asked = bench(handler)

    assert not await asked.ready()
    assert asked.waits == []
    assert await asked.models() == ("m1", "m2")


async def test_the_real_application_over_the_async_client() -> None:
    backend = ScriptedBackend(lambda prompt: "Grüße, 世界 🌍")
    app = scripted_app(backend, Settings(), ManualClock())
    text = "One document.\n\n" * 40

    async with AsyncClient("http://service", transport=httpx.ASGITransport(app)) as client:
        first = await client.chat("q", documents=[Document(text, "d")], temperature=0)
        again = await client.chat("r", documents=[Document(text, "d")], temperature=0)
        plain = await client.complete("prompt", max_tokens=5)
        async with await client.stream_complete("prompt", max_tokens=5) as stream:
            pieces = [piece async for piece in stream]
        with pytest.raises(InvalidRequest, match="temperature") as caught:
            await client.chat("q", temperature=-1)
        with pytest.raises(ModelNotFound):
            await client.chat("q", model="gpt")

    assert (first.text, first.finish_reason) == ("Grüße, 世界 🌍", "stop")
    assert (first.cached_tokens, again.cached_tokens > 500) == (0, True)
    assert (plain.output_tokens, plain.finish_reason) == (5, "length")
    assert "".join(pieces) == plain.text
    assert caught.value.field == "temperature"


def _documented() -> list[type[RakvError]]:
    kinds = [getattr(errors, name) for name in dir(errors)]
    return [k for k in kinds if isinstance(k, type) and issubclass(k, RakvError)]


@pytest.mark.parametrize("kind", _documented(), ids=lambda k: k.__name__)
def test_every_error_comes_back_as_itself(kind: type[RakvError]) -> None:
    body = {"error": {"message": "m", "code": kind.code, "param": "f"}}

    error = error_of(body, status=kind.http_status)

    assert error.code == kind.code
    assert (error.message, error.field) == ("m", "f")


@pytest.mark.parametrize(
    ("status", "kind"), [(401, Unauthenticated), (429, Overloaded), (503, Unavailable)]
)
def test_an_unknown_code_goes_by_its_status(status: int, kind: type[RakvError]) -> None:
    assert type(error_of({"error": {"code": "new"}}, status=status)) is kind
    assert type(error_of([], status=status)) is kind
    assert type(error_of({"error": "x"}, status=599)) is RakvError
