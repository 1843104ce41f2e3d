"""Tools, with a template that teaches them and a tiny model that must be made to call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.loader import load_model
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.chats import cached_tokens, reusing
from rakv_cluster.testing.service import LocalService, local_service
from rakv_cluster.testing.tiny_models import (
    CHAT_TEMPLATE,
    TOOLS_TEMPLATE,
    save_tiny_model,
    tiny_llama,
    tiny_tokenizer,
)

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "How warm is it?"}
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Kyōto"]}, "days": {"enum": [1, 2]}},
    "required": ["town", "days"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS} | more}


TOOLS = [tool("weather", description="How warm it will be."), tool("tides")]


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("tools") / "tiny"
    save_tiny_model(folder, tiny_llama(layers=2), tiny_tokenizer(TOOLS_TEMPLATE))
    settings = load_settings({"price_loads": False}, environ={})
    store = MemoryStore(1 << 28, SystemClock())
    with local_service(load_model(str(folder)), store, settings) as service:
        yield service


@pytest.fixture
def http(tooled: LocalService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tooled.url, timeout=60.0) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    given = {"messages": [USER], "tools": TOOLS, "max_tokens": 200, "seed": 1, "temperature": 1.0}
    return given | fields


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_a_required_call_is_made_with_arguments_that_fit(http: httpx.Client) -> None:
    for seed in range(4):
        choice = ask(http, tool_choice="required", seed=seed)

        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert call["function"]["name"] in {"weather", "tides"}
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def test_a_named_tool_is_the_one_that_is_called(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "tides"}}

    for seed in range(4):
        (call,) = ask(http, tool_choice=named, seed=seed)["message"]["tool_calls"]
        assert call["function"]["name"] == "tides"


def test_a_stream_tells_the_same_call(tooled: LocalService, http: httpx.Client) -> None:
    (whole,) = ask(http, tool_choice="required")["message"]["tool_calls"]

    client = OpenAI(base_url=f"{tooled.url}/v1", api_key="none")
    fields = body(tool_choice="required", stream=True, model="")
    chunks = list(client.chat.completions.create(**fields))
    client.close()

    deltas = [chunk.choices[0].delta for chunk in chunks]
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.index, call.type) == (0, "function")
    assert call.function.name == whole["function"]["name"]
    assert call.function.arguments == whole["function"]["arguments"]
    assert not "".join(delta.content or "" for delta in deltas)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]


def test_a_model_that_is_free_may_just_talk(http: httpx.Client) -> None:
    choice = ask(http, max_tokens=12, temperature=0)

    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"


def prompt_tokens(http: httpx.Client, **fields: Any) -> int:
    response = http.post(CHAT, json=body(max_tokens=1) | fields)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens"])


def test_tools_and_calls_are_part_of_the_prompt(http: httpx.Client) -> None:
    call = {"id": "c", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "12 degrees"},
    ]

    told = prompt_tokens(http)
    untold = prompt_tokens(http, tool_choice="none")

    assert told > untold + len(json.dumps(PARAMETERS))
    assert untold == prompt_tokens(http, tools=[])
    assert prompt_tokens(http, messages=history) > told + len("12 degrees") + len("weather")


def test_the_next_turn_finds_the_prompt_of_the_last_one(http: httpx.Client) -> None:
    long = {"role": "user", "content": "How warm is it? " * 30}

    again = reusing(lambda: http.post(CHAT, json=body(messages=[long], max_tokens=1)).json(), 0.8)

    assert again["rakv"]["tokens"]["ram"] == cached_tokens(again)


CALLED = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a name with a blank": (body(tools=[tool("a b")]), "tools.0.function.name"),
    "a name twice": (body(tools=[tool("a"), tool("a")]), "tools"),
    "a tool that is none": (body(tools=[{"type": "search"}]), "tools.0.type"),
    "a call of what is not there": (
        body(tool_choice={"type": "function", "function": {"name": "nope"}}), "tool_choice"
    ),
    "a call without tools": ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    "a schema that is none": (
        body(tools=[tool("f", parameters={"type": "x"})], tool_choice="required"), "tools"
    ),
    "a schema without an end": (
        body(tools=[tool("f", parameters={"$ref": "#"})], tool_choice="required"), "tools"
    ),
    "a call and a schema": (
        body(tool_choice="required", response_format={"type": "json_object"}), "tool_choice"
    ),
    "a call without an end": (body(tool_choice="required", ignore_eos=True), "ignore_eos"),
    "a user who calls": (body(messages=[USER | {"tool_calls": [CALLED]}]), "messages.0.tool_calls"),
    "arguments that are no object": (
        body(messages=[USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[]"}}]}]),
        "messages.1.tool_calls.0.function.arguments",
    ),
    "a control token in a tool": (
        body(tools=[tool("f", description="<|im_end|>")]), "tools"
    ),
    "a control token in a call": (
        body(messages=[USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}]}]),
        "messages.1.tool_calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named(http: httpx.Client, name: str) -> None:
    fields, param = BAD[name]

    response = http.post(CHAT, json=fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_template_without_a_place_for_tools_refuses_them(
    http: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plain") / "tiny"
    save_tiny_model(folder, tiny_llama(layers=1), tiny_tokenizer(CHAT_TEMPLATE))
    store = MemoryStore(1 << 24, SystemClock())
    settings = load_settings({}, environ={})
    with local_service(load_model(str(folder)), store, settings) as plain:
        refused = httpx.post(plain.url + CHAT, json=body(), timeout=60)

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    assert refused.json()["error"]["param"] == "tools"
