"""Bad input over HTTP: each a 4xx that names the field, and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from rakv_cluster.testing.service import LocalService

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
TOO_LONG = "x" * 5000


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 4} | fields


def expect_error(response: httpx.Response, status: int, param: str | None, code: str) -> str:
    """Check the whole shape of an OpenAI error; returns its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert "Traceback" not in response.text
    return str(body["error"]["message"])


BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "messages missing": ({"max_tokens": 3}, "messages"),
    "messages null": ({"messages": None}, "messages"),
    "only blank messages": (chat(messages=[{"role": "user", "content": " \n"}]), "messages"),
    "content missing": (chat(messages=[{"role": "user"}]), "messages.0.content"),
    "content a number": (chat(messages=[{"role": "user", "content": 5}]), "messages.0.content"),
    "an image": (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
                 "messages.0.content"),
    "a role nobody has": (chat(messages=[{"role": "boss", "content": "x"}]), "messages.0.role"),
    "unknown field": (chat(temprature=1), "temprature"),
    "unknown field, null": (chat(nonsense=None), "nonsense"),
    "unknown field of a message": (chat(messages=[USER[0] | {"x": 1}]), "messages.0.x"),
    "temperature -1": (chat(temperature=-1), "temperature"),
    "temperature 3": (chat(temperature=3), "temperature"),
    "temperature a text": (chat(temperature="1"), "temperature"),
    "temperature true": (chat(temperature=True), "temperature"),
    "top_p 0": (chat(top_p=0), "top_p"),
    "max_tokens 0": (chat(max_tokens=0), "max_tokens"),
    "max_tokens -1": (chat(max_tokens=-1), "max_tokens"),
    "max_tokens 1.5": (chat(max_tokens=1.5), "max_tokens"),
    "max_completion_tokens 0": ({"messages": USER, "max_completion_tokens": 0},
                                "max_completion_tokens"),
    "two limits that differ": (chat(max_completion_tokens=5), "max_tokens"),
    "min above max": (chat(min_tokens=5), "min_tokens"),
    "min above the default limit": ({"messages": USER, "min_tokens": 600}, "min_tokens"),
    "n 0": (chat(n=0), "n"),
    "n 17": (chat(n=17), "n"),
    "empty stop": (chat(stop=["a", ""]), "stop.1"),
    "17 stops": (chat(stop=["a"] * 17), "stop"),
    "seed too large": (chat(seed=2**63), "seed"),
    "top_logprobs alone": (chat(top_logprobs=2), "top_logprobs"),
    "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "bias of no token": (chat(logit_bias={"x": 1}), "logit_bias.x"),
    "bias of an unknown token": (chat(logit_bias={"259": 1}), "logit_bias"),
    "bias too strong": (chat(logit_bias={"5": 101}), "logit_bias.5"),
    "stop token unknown": (chat(stop_token_ids=[259]), "stop_token_ids"),
    "document without text or id": (chat(documents=[{}]), "documents.0.text"),
    "document with empty text": (chat(documents=[{"text": ""}]), "documents.0.text"),
    "document a text": (chat(documents=["a"]), "documents.0"),
    "257 documents": (chat(documents=[{"text": "a"}] * 257), "documents"),
    "documents and no user": (chat(messages=[{"role": "system", "content": "s"}],
                                   documents=[{"text": "a"}]), "documents"),
    "reuse of a mode there is not": (chat(reuse="maybe"), "reuse"),
    "stream_options alone": (chat(stream_options={"include_usage": True}), "stream_options"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_bad_chat_names_its_field(http: httpx.Client, name: str) -> None:
    body, field = BAD_CHATS[name]

    expect_error(http.post(CHAT, json=body), 400, field, "invalid_request_error")


BAD_COMPLETIONS = {
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no prompt": ({}, "prompt"),
    "ids and texts": ({"prompt": [1, "a"]}, "prompt"),
    "two lists of ids": ({"prompt": [[1], [2]]}, "prompt"),
    "an id below 0": ({"prompt": [-1]}, "prompt"),
    "an id of no token": ({"prompt": [259]}, "prompt"),
    "ids and documents": ({"prompt": [1], "documents": [{"text": "a"}]}, "documents"),
    "two prompts": ({"prompt": ["a", "b"]}, "prompt"),
    "messages": ({"prompt": "a", "messages": USER}, "messages"),
    "logprobs 21": ({"prompt": "a", "logprobs": 21}, "logprobs"),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_a_bad_completion_names_its_field(http: httpx.Client, name: str) -> None:
    body, field = BAD_COMPLETIONS[name]

    expect_error(http.post(COMPLETIONS, json=body), 400, field, "invalid_request_error")


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        (CHAT, chat(messages=[{"role": "user", "content": TOO_LONG}]), "messages"),
        (CHAT, chat(documents=[{"text": TOO_LONG}]), "messages"),
        (CHAT, {"messages": USER, "max_tokens": 2040}, "max_tokens"),
        (COMPLETIONS, {"prompt": TOO_LONG}, "prompt"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(
    http: httpx.Client, endpoint: str, body: dict[str, Any], field: str
) -> None:
    message = expect_error(http.post(endpoint, json=body), 400, field, "context_length_exceeded")

    assert "2048" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("store", True),
        ("service_tier", "flex"),
        ("modalities", ["audio"]),
    ],
)
def test_a_known_field_that_would_matter_is_unsupported(
    http: httpx.Client, field: str, value: object
) -> None:
    response = http.post(CHAT, json=chat(**{field: value}))

    expect_error(response, 400, field, "unsupported_parameter")


def test_known_fields_with_neutral_values_are_accepted(http: httpx.Client) -> None:
    neutral = {"user": "u", "store": False, "metadata": {"a": "b"}, "tools": [],
               "tool_choice": "none", "response_format": {"type": "text"},
               "parallel_tool_calls": True, "service_tier": "auto", "seed": None,
               "stop": None, "logit_bias": {}, "temperature": 1, "n": 1}  # fmt: skip

    assert http.post(CHAT, json=chat(**neutral)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b'"text"',
        b"[]",
        b'{"messages": [',
        b'{"messages": "\xff\xfe"}',
        '{"messages": []}'.encode("utf-16"),
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"temperature": Infinity, "messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    expect_error(http.post(CHAT, content=body), 400, None, "invalid_request_error")


def test_an_infinite_number_is_refused_by_its_field(http: httpx.Client) -> None:
    body = json.dumps(chat()).replace('"max_tokens": 4', '"temperature": 1e999')

    expect_error(http.post(CHAT, content=body), 400, "temperature", "invalid_request_error")


def test_a_body_of_10_mb_is_refused(http: httpx.Client) -> None:
    response = http.post(CHAT, json=chat(documents=[{"text": "x" * 10_000_000}]))

    expect_error(response, 413, "body", "body_too_large")


def test_an_announced_length_is_refused_before_the_body_comes(local: LocalService) -> None:
    host, port = local.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
        )

        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_announced_length_is_cut_off(http: httpx.Client) -> None:
    parts = (b"x" * 1_000_000 for _ in range(12))

    expect_error(http.post(CHAT, content=parts), 413, "body", "body_too_large")


@pytest.mark.parametrize("path", ["/", "/nope", "/v1", "/v1/chat"])
def test_an_unknown_path_is_404_in_shape(http: httpx.Client, path: str) -> None:
    expect_error(http.get(path), 404, None, "not_found")


def test_another_method_is_405_in_shape(http: httpx.Client) -> None:
    expect_error(http.get(CHAT), 405, None, "method_not_allowed")


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    message = expect_error(
        http.post(CHAT, json=chat(model="gpt-4")), 404, "model", "model_not_found"
    )

    assert "tiny" in message
    expect_error(http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")


def test_the_server_still_answers(http: httpx.Client, local: LocalService) -> None:
    response = http.post(CHAT, json=chat())

    assert response.status_code == 200
    assert http.get("/readyz").status_code == 200
