"""What OpenAI's own clients send, as they send it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

from rakv_cluster.config import Settings
from rakv_cluster.errors import InvalidRequest
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.openai_models import ChatRequest, validated
from rakv_cluster.serving.route_api import add_route_explanation
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.one_replica import OneReplica
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app, scripted_service

USER = {"role": "user", "content": "Hello"}


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    app = scripted_app(ScriptedBackend(), Settings(), ManualClock())
    transport = httpx.ASGITransport(app)
    async with openai.AsyncOpenAI(
        base_url="http://service/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        yield client


SCOPE = {
    "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
    "query_string": b"", "asgi": {"version": "3.0", "spec_version": "2.4"},
}  # fmt: skip


async def test_a_client_that_leaves_before_its_body_is_there_is_no_defect() -> None:
    app = scripted_app(ScriptedBackend(), Settings(), ManualClock())
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(SCOPE, receive, send)  # raises a defect

    assert sent[0]["status"] == 499


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_client_that_leaves_before_its_stream_begins_ends_it(spec_version: str) -> None:
    backend = ScriptedBackend(lambda prompt: "a long answer")
    backend.hold()
    app = scripted_app(backend, Settings(), ManualClock())
    gone = asyncio.Event()
    body = [b'{"prompt": "x", "stream": true}']

    async def receive() -> dict[str, Any]:
        if not body:
            await gone.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        raise OSError("the connection is closed")

    with suppress(OSError, ClientDisconnect):
        await app({**SCOPE, "asgi": {"spec_version": spec_version}}, receive, send)

    assert backend.cancelled == [request.request_id for request in backend.requests]


@pytest.mark.parametrize("as_dict", [False, True])
async def test_an_answers_message_can_be_sent_back(
    as_dict: bool, client: openai.AsyncOpenAI
) -> None:
    history: list[Any] = [USER]
    first = await client.chat.completions.create(model="", messages=history)
    message = first.choices[0].message
    history += [message.model_dump() if as_dict else message, USER]

    again = await client.chat.completions.create(model="", messages=history)

    assert again.usage.prompt_tokens > first.usage.total_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**USER, "tool_calls": None, "tool_call_id": None, "name": None}]},
        {"documents": [{"text": "a", "id": None}]},
        {"stream": True, "stream_options": {"include_usage": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {}, "strict": None, "description": None},
            }
        },
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}
            ]
        },
    ],
)
def test_null_means_not_given_inside_fields_too(fields: dict[str, Any]) -> None:
    assert validated(ChatRequest, {"messages": [USER], **fields})


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_a_message_may_have_a_name(role: str, client: openai.AsyncOpenAI) -> None:
    named: Any = {"role": role, "content": "Hello", "name": "ann"}

    answer = await client.chat.completions.create(model="", messages=[named, USER])

    assert answer.choices[0].message.content


@pytest.mark.parametrize("name", ["x" * 129, 5])
def test_a_wrong_name_is_refused_by_its_place(name: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        validated(ChatRequest, {"messages": [USER, {**USER, "name": name}]})

    assert refusal.value.field == "messages.1.name"


@pytest.mark.parametrize(
    "choice", ["maybe", {"type": "function"}, {"type": "function", "function": {"name": "a b"}}, 5]
)
def test_a_wrong_tool_choice_is_named_as_the_client_knows_it(choice: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        validated(ChatRequest, {"messages": [USER], "tool_choice": choice})

    assert refusal.value.field == "tool_choice"


async def test_what_a_body_is_does_not_hang_on_its_texts() -> None:
    service = scripted_service(ScriptedBackend(), Settings(), ManualClock())
    app = create_app(service, ServiceMetrics())
    add_route_explanation(app, service, OneReplica())

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        body = {"prompt": "x", "stop": "messages"}
        answer = await http.post("/v1/route/explain", json=body)

    assert answer.status_code == 200, answer.text
