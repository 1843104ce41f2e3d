"""The timed chat client against the events a server sends."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rakv_cluster.client.chat import stream_chat
from rakv_cluster.errors import RakvError, Unavailable
from rakv_cluster.testing.clock import ManualClock


def event(content: str | None = None, finish: str | None = None, **extra: Any) -> str:
    choices = [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]
    return "data: " + json.dumps({"choices": choices, **extra}) + "\n\n"


def client_for(handler: Any) -> httpx.Client:
    return httpx.Client(base_url="http://service", transport=httpx.MockTransport(handler))


def test_collects_text_usage_and_times_the_first_piece() -> None:
    clock = ManualClock()

    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            yield event("").encode()
            clock.advance(0.5)
            yield event("Hel").encode()
            clock.advance(2.0)
            yield (event("lo") + event(finish="stop")).encode()
            usage = {"prompt_tokens": 9, "completion_tokens": 5}
            yield (
                "data: " + json.dumps({"choices": [], "usage": usage, "rakv": {"x": 1}}) + "\n\n"
            ).encode()
            yield b"data: [DONE]\n\n"

    seen: list[dict[str, Any]] = []
    pieces: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, stream=Stream())

    with client_for(handler) as client:
        answer = stream_chat(client, {"messages": []}, clock=clock, on_text=pieces.append)

    assert seen == [{"messages": [], "stream": True, "stream_options": {"include_usage": True}}]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert "".join(pieces) == "Hello"
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.total_s == pytest.approx(2.5)
    assert answer.tokens_per_s == pytest.approx(2.0)
    assert answer.rakv == {"x": 1}


def test_a_refusal_carries_the_servers_words() -> None:
    body = {"error": {"message": "temperature must be >= 0", "type": "invalid_request_error"}}
    with (
        client_for(lambda request: httpx.Response(400, json=body)) as client,
        pytest.raises(RakvError, match="temperature must be >= 0"),
    ):
        stream_chat(client, {}, clock=ManualClock())


def test_a_refusal_without_json_names_the_status() -> None:
    with (
        client_for(lambda request: httpx.Response(502, text="<html>")) as client,
        pytest.raises(RakvError, match="502"),
    ):
        stream_chat(client, {}, clock=ManualClock())


def test_an_error_inside_the_stream_is_raised() -> None:
    content = event("Hal") + 'data: {"error": {"message": "replica died"}}\n\n'
    with (
        client_for(lambda request: httpx.Response(200, text=content)) as client,
        pytest.raises(RakvError, match="replica died"),
    ):
        stream_chat(client, {}, clock=ManualClock())


def test_no_server_is_unavailable() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with client_for(refuse) as client, pytest.raises(Unavailable, match="http://service"):
        stream_chat(client, {}, clock=ManualClock())
