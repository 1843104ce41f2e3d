"""One way to ask over HTTP and gRPC, below the clients: for tests that hold for both surfaces.

Fields are those of the HTTP surface, ``top_logprobs`` alone asks for log-probabilities on both,
``json_schema`` is a schema's text, ``tools`` are (name, schema) and ``tool_choice`` a text as over
gRPC, and ``timeout_s`` is the deadline. What the service refuses is
raised as the class of the error tree.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import httpx
from google.protobuf.json_format import MessageToDict

from rakv_cluster.client.answers import error_of
from rakv_cluster.client.async_grpc import AsyncGrpcClient
from rakv_cluster.client.async_http import AsyncClient
from rakv_cluster.client.grpc_calls import translated
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.logs import HEADER
from rakv_cluster.rpc.calls import methods
from rakv_cluster.rpc.v1 import cache_pb2 as cache
from rakv_cluster.rpc.v1 import generation_pb2 as generation

_TIMEOUT_S = 120.0
_FINISH = {0: "", 1: "stop", 2: "length", 3: "tool_calls"}
_REUSE = {"exact": generation.REUSE_EXACT, "off": generation.REUSE_OFF}


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token with its alternatives, the likeliest first, as (bytes, log-probability)."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """A request's accounts; ``sources`` are prompt tokens by where their KV came from."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A choice's next text in a stream; ``finish_reason`` is empty before its last one."""

    index: int
    text: str
    finish_reason: str
    calls: tuple[Call, ...] = ()


Call = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer: texts, ends, log-probabilities and calls, (name, arguments), by choice."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    logprobs: tuple[tuple[Logprob, ...], ...]
    calls: tuple[tuple[Call, ...], ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.texts[0]


Event = Piece | Usage


class Surface(Protocol):
    """A service as one protocol shows it to the holder of one key."""

    name: str

    def ask(self, **fields: Any) -> Reply:
        """The whole answer to a request."""
        ...

    def stream(self, **fields: Any) -> AbstractContextManager[Generator[Event, None, None]]:
        """The answer as it comes, then the usage; leaving the context early cancels."""
        ...

    def cache(self, operation: str, **fields: Any) -> dict[str, Any]:
        """An operation on a prompt's KV: ``warm``, ``lookup``, ``pin``, ``unpin``, ``evict``."""
        ...

    def stats(self) -> dict[str, Any]:
        """The cache's figures by node, and those of one replica."""
        ...

    def explain(self, **fields: Any) -> dict[str, Any]:
        """Where a request would go."""
        ...

    def client(self) -> AsyncClient | AsyncGrpcClient:
        """The client for asyncio."""
        ...

    def close(self) -> None:
        """End its connection."""
        ...


class HttpSurface:
    """Over HTTP."""

    name = "http"

    def __init__(self, url: str, key: str = "", *, request_id: str = "") -> None:
        self._url, self._key = url, key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers |= {HEADER: request_id} if request_id else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)

    def ask(self, **fields: Any) -> Reply:
        path, body = _http_body(fields)
        answer = self._post(path, body)
        choices = answer["choices"]
        return Reply(
            tuple(c["message"]["content"] or "" if "message" in c else c["text"] for c in choices),
            tuple(choice["finish_reason"] for choice in choices),
            tuple(_http_logprobs(choice["logprobs"]) for choice in choices),
            tuple(_http_calls(choice.get("message", {})) for choice in choices),
            _http_usage(answer),
        )

    @contextmanager
    def stream(self, **fields: Any) -> Generator[Generator[Event, None, None], None, None]:
        path, body = _http_body(fields)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                self._answer(response)
            yield _http_events(response)

    def cache(self, operation: str, **fields: Any) -> dict[str, Any]:
        return self._post(f"/v1/cache/{operation}", fields)

    def stats(self) -> dict[str, Any]:
        told = self._answer(self._http.get("/v1/cache/stats"))
        return told | {"replica": next(iter(told["replicas"].values()))}

    def explain(self, **fields: Any) -> dict[str, Any]:
        return self._post("/v1/route/explain", fields)

    def client(self) -> AsyncClient:
        return AsyncClient(self._url, api_key=self._key, retries=NO_RETRIES)

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer(self._http.post(path, json=body))

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        answer: dict[str, Any] = response.json()
        if response.is_error:
            retry_after = response.headers.get("retry-after", "")
            raise error_of(answer, status=response.status_code, retry_after=retry_after)
        return answer


class GrpcSurface:
    """Over gRPC."""

    name = "grpc"

    def __init__(self, target: str, key: str = "", *, request_id: str = "") -> None:
        self._target, self._key = target, key
        # A channel of its own: others with the same target would share one connection.
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._metadata += [(HEADER, request_id)] if request_id else []

    def ask(self, **fields: Any) -> Reply:
        request, timeout_s = _grpc_request(fields)
        answer = self._call("Generate", request, timeout_s)
        return Reply(
            tuple(choice.text for choice in answer.choices),
            tuple(_FINISH[choice.finish_reason] for choice in answer.choices),
            tuple(tuple(map(_grpc_logprob, choice.logprobs)) for choice in answer.choices),
            tuple(_grpc_calls(choice) for choice in answer.choices),
            _grpc_usage(answer.usage),
        )

    @contextmanager
    def stream(self, **fields: Any) -> Generator[Generator[Event, None, None], None, None]:
        request, timeout_s = _grpc_request(fields)
        call = self._start("GenerateStream", request, timeout_s)
        try:
            yield _grpc_events(call)
        finally:
            call.cancel()

    def cache(self, operation: str, **fields: Any) -> dict[str, Any]:
        more = {name: fields.pop(name) for name in ("owner", "ttl_s") if name in fields}
        request = getattr(cache, f"{operation.title()}Request")(input=_input(fields), **more)
        return _plain(self._call(operation.title(), request))

    def stats(self) -> dict[str, Any]:
        return _plain(self._call("Stats", cache.StatsRequest()))

    def explain(self, **fields: Any) -> dict[str, Any]:
        request, _ = _grpc_request(fields)
        return _plain(self._call("ExplainRoute", generation.ExplainRouteRequest(request=request)))

    def client(self) -> AsyncGrpcClient:
        return AsyncGrpcClient(self._target, api_key=self._key, retries=NO_RETRIES)

    def close(self) -> None:
        self._channel.close()

    def _call(self, name: str, request: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        with translated():
            return self._start(name, request, timeout_s)

    def _start(self, name: str, request: Any, timeout_s: float) -> Any:
        method = next(method for method in methods() if method.name == name)
        make = self._channel.unary_stream if method.streams else self._channel.unary_unary
        call: Any = make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return call(request, timeout=timeout_s, metadata=self._metadata)


def _http_body(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    body = dict(fields)
    if "json_schema" in body:
        schema = {"schema": json.loads(body.pop("json_schema"))}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if "tools" in body:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": json.loads(schema)}}
            for name, schema in body["tools"]
        ]
    kind, _, name = str(body.get("tool_choice", "")).partition(":")
    if name:
        body["tool_choice"] = {"type": kind, "function": {"name": name}}
    if "prompt" in body:
        if "top_logprobs" in body:
            body["logprobs"] = body.pop("top_logprobs")
        return "/v1/completions", body
    if "top_logprobs" in body:
        body["logprobs"] = True
    return "/v1/chat/completions", body


def _http_events(response: httpx.Response) -> Generator[Event, None, None]:
    for line in response.iter_lines():
        payload = line.removeprefix("data: ")
        if not payload or payload == "[DONE]":
            continue
        event = json.loads(payload)
        if "error" in event:
            raise error_of(event, status=0)
        for choice in event["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            calls = _http_calls(choice.get("delta", {}))
            yield Piece(choice["index"], text, choice["finish_reason"] or "", calls)
        if "usage" in event:
            yield _http_usage(event)


def _http_calls(message: Mapping[str, Any]) -> tuple[Call, ...]:
    made = [call["function"] for call in message.get("tool_calls", ())]
    return tuple((function["name"], function["arguments"]) for function in made)


def _http_usage(answer: Mapping[str, Any]) -> Usage:
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = answer["rakv"]["tokens"]
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, tokens)


def _http_logprobs(given: Mapping[str, Any] | None) -> tuple[Logprob, ...]:
    if given is None:
        return ()
    if "content" in given:
        return tuple(
            Logprob(
                bytes(entry["bytes"]),
                entry["logprob"],
                tuple((bytes(top["bytes"]), top["logprob"]) for top in entry["top_logprobs"]),
            )
            for entry in given["content"]
        )
    parts = zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True)
    return tuple(
        Logprob(token.encode(), value, tuple((text.encode(), v) for text, v in top.items()))
        for token, value, top in parts
    )


def _grpc_request(fields: Mapping[str, Any]) -> tuple[generation.GenerateRequest, float]:
    rest = dict(fields)
    timeout_s = rest.pop("timeout_s", _TIMEOUT_S)
    given = _input(rest)
    if isinstance(rest.get("stop"), str):
        rest["stop"] = [rest["stop"]]
    if "reuse" in rest:
        rest["reuse"] = _REUSE[rest["reuse"]]
    if "logit_bias" in rest:
        rest["logit_bias"] = {int(token): bias for token, bias in rest["logit_bias"].items()}
    if "tools" in rest:
        rest["tools"] = [generation.Tool(name=n, parameters=s) for n, s in rest["tools"]]
    return generation.GenerateRequest(input=given, **rest), timeout_s


def _input(fields: dict[str, Any]) -> generation.Input:
    """Takes the fields of the prompt out of ``fields``."""
    documents = [generation.Document(**d) for d in fields.pop("documents", [])]
    if "messages" in fields:
        chat = generation.Chat(messages=map(_message, fields.pop("messages")))
        return generation.Input(chat=chat, documents=documents)
    prompt = fields.pop("prompt")
    if isinstance(prompt, str):
        return generation.Input(prompt=prompt, documents=documents)
    return generation.Input(token_ids=generation.TokenIds(ids=prompt), documents=documents)


def _message(fields: Mapping[str, Any]) -> generation.Message:
    rest = dict(fields)
    calls = [
        generation.ToolCall(id=call.get("id", ""), **call["function"])
        for call in rest.pop("tool_calls", ())
    ]
    return generation.Message(tool_calls=calls, **rest)


def _grpc_events(call: Any) -> Generator[Event, None, None]:
    with translated():
        for event in call:
            if event.HasField("usage"):
                yield _grpc_usage(event.usage)
            else:
                delta = event.delta
                end = _FINISH[delta.finish_reason]
                yield Piece(delta.index, delta.text, end, _grpc_calls(delta))


def _grpc_calls(choice: generation.Choice) -> tuple[Call, ...]:
    return tuple((call.name, call.arguments) for call in choice.tool_calls)


def _grpc_usage(usage: generation.Usage) -> Usage:
    sources = dict(usage.prompt_sources)
    return Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, sources)


def _grpc_logprob(entry: generation.TokenLogprob) -> Logprob:
    top = tuple((alternative.token, alternative.logprob) for alternative in entry.top)
    return Logprob(entry.token, entry.logprob, top)


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
