"""The gRPC surface over a real socket: the same service as over HTTP, explicit outcomes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fastapi import FastAPI
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster import errors
from rakv_cluster.client import Client, Document, Message
from rakv_cluster.client.grpc import GrpcClient
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.errors import (
    BodyTooLarge,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RakvError,
    Unauthenticated,
    Unavailable,
    UnsupportedParameter,
)
from rakv_cluster.kv.codec import encode
from rakv_cluster.rpc.calls import methods
from rakv_cluster.rpc.status import DETAILS_KEY, details_of, error_from, status_code
from rakv_cluster.rpc.v1 import cache_pb2 as cache
from rakv_cluster.rpc.v1 import generation_pb2 as generation
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.grpc_messages import generation_request
from rakv_cluster.serving.grpc_server import GrpcServer
from rakv_cluster.serving.grpc_service import GrpcSurface
from rakv_cluster.serving.keys import KeyTable, TenantLimits, new_key, write_table
from rakv_cluster.serving.openai_models import ChatRequest
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.grpc_server import grpc_server
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.one_replica import OneReplica
from rakv_cluster.testing.records import tiny_record
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app, scripted_service
from rakv_cluster.testing.simulated_shards import Fault, SimulatedShards

NODES = ["n0", "n1"]
TEXT = "Line of a document.\n\n" * 40
DOCUMENTS = [Document(TEXT, "d")]


class Served:
    """A scripted backend behind gRPC, its shards, and clients that close with it."""

    def __init__(self, target: str, backend: ScriptedBackend, shards: SimulatedShards) -> None:
        self.target = target
        self.backend = backend
        self.shards = shards
        self.clients: list[GrpcClient] = []

    def client(self, **options: Any) -> GrpcClient:
        client = GrpcClient(self.target, retries=NO_RETRIES, **options)
        self.clients.append(client)
        return client

    def hold(self, prompt: tuple[bytes, ...], node: str) -> None:
        """Put records under a prompt's keys on a node."""
        for number, key in enumerate(prompt):
            self.shards.hold(node, encode(replace(tiny_record(number), key=key)))


def answer(prompt: str) -> str:
    if "raise a bug" in prompt:
        raise RuntimeError("secret detail")
    if "be overloaded" in prompt:
        raise Overloaded("full", retry_after_s=2.5)
    return "Grüße, 世界 🌍"


def serve(served_settings: Settings) -> Iterator[Served]:
    backend = ScriptedBackend(answer)
    shards = SimulatedShards(NODES, ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, lambda: NODES, ManualClock())
    with grpc_server(
        lambda: scripted_service(backend, served_settings, ManualClock()), admin
    ) as target:
        served = Served(target, backend, shards)
        yield served
        for client in served.clients:
            client.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serve(Settings(body_limit_bytes=1 << 20))


@pytest.fixture
def fresh() -> Iterator[Served]:
    yield from serve(Settings())


# --- generation


def test_an_answer_its_usage_and_reuse(fresh: Served) -> None:
    client = fresh.client()

    first = client.chat("q", documents=DOCUMENTS, temperature=0)
    again = client.chat("another", documents=DOCUMENTS, temperature=0)

    assert (first.text, first.finish_reason) == ("Grüße, 世界 🌍", "stop")
    assert (first.cached_tokens, again.cached_tokens > 500) == (0, True)
    assert again.sources["ram"] == again.cached_tokens
    assert again.sources["computed"] + again.cached_tokens == again.prompt_tokens
    assert first.output_tokens == len(first.text.encode())
    assert first.rakv["exactness"] in {"bitwise", "guarded", "numerically equivalent"}
    assert first.rakv["other_numeric_class_tokens"] == 0


def test_a_set_of_documents_is_reordered_and_the_order_reported(fresh: Served) -> None:
    documents = [Document("Alpha. " * 40, "a"), Document("Beta. " * 40, "b")]
    client = fresh.client()
    client.chat("Hello", documents=documents)
    backwards = documents[::-1]

    reordered = client.chat("Hello", documents=backwards, reuse="reorder")
    given = client.chat("Hello", documents=backwards)

    assert reordered.rakv["documents"]["indices"] == [1, 0]
    assert given.rakv["documents"]["indices"] == [0, 1]
    assert reordered.cached_tokens > given.cached_tokens


def test_a_stream_gives_whole_characters_in_order_and_the_usage_last(served: Served) -> None:
    with served.client().stream_chat("q", documents=DOCUMENTS) as stream:
        pieces = list(stream)

    assert len(pieces) > 2
    assert "".join(pieces) == stream.answer.text == "Grüße, 世界 🌍"


def test_a_unary_answer_has_every_choice(served: Served) -> None:
    request = generation.GenerateRequest(input=generation.Input(prompt="go on"), n=3, max_tokens=4)
    with grpc.insecure_channel(served.target) as channel:
        response = generation.GenerateResponse.FromString(
            channel.unary_unary("/rakv.v1.Generation/Generate")(request.SerializeToString())
        )

    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert {choice.text for choice in response.choices} == {"Grü"}
    assert {choice.finish_reason for choice in response.choices} == {
        generation.FINISH_REASON_LENGTH
    }
    assert (response.model, response.usage.output_tokens) == ("scripted", 12)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "max_tokens": 9},
    {"temperature": 0, "seed": -3, "stop": "世", "presence_penalty": 0.5, "frequency_penalty": -1},
    {"seed": 0, "repetition_penalty": 1.5, "logit_bias": {"7": -3.5}, "ignore_eos": True},
    {"seed": 1, "stop": ["x", "y"], "stop_token_ids": [5, 6], "min_tokens": 2, "reuse": "off"},
]


def _nameless(request: EngineRequest) -> EngineRequest:
    return replace(request, request_id="", trace_id="")


@pytest.mark.parametrize("options", OPTIONS)
def test_both_surfaces_ask_the_engine_for_the_same(options: dict[str, Any]) -> None:
    messages = [Message("system", "s"), Message("user", "u"), Message("assistant", "a"),
                Message("user", "v")]  # fmt: skip
    backends = ScriptedBackend(answer), ScriptedBackend(answer)
    admin = StoreAdmin(
        SimulatedShards([], ManualClock(), np.random.default_rng(0)), tuple, ManualClock()
    )

    async def application() -> FastAPI:
        return scripted_app(backends[0], Settings(), ManualClock())

    with (
        http_server(application) as url,
        grpc_server(
            lambda: scripted_service(backends[1], Settings(), ManualClock()), admin
        ) as target,
        Client(url) as http,
        GrpcClient(target) as client,
    ):
        answers = [asked.chat(messages, documents=DOCUMENTS, **options) for asked in (http, client)]
        more = [asked.complete("prompt", **options) for asked in (http, client)]

    assert answers[0].text == answers[1].text
    assert answers[0].finish_reason == answers[1].finish_reason
    assert answers[0].usage == answers[1].usage
    assert answers[0].sources == answers[1].sources
    assert [m.text for m in more] == [more[0].text] * 2
    for over_http, over_grpc in zip(backends[0].requests, backends[1].requests, strict=True):
        assert _nameless(over_http) == _nameless(over_grpc)


def test_a_messages_name_means_the_same_here() -> None:
    message = generation.Message(role="user", content="q", name="ann")
    asked = generation.GenerateRequest(
        input=generation.Input(chat=generation.Chat(messages=[message]))
    )

    request = generation_request(asked)

    assert isinstance(request, ChatRequest)
    (read,) = request.messages
    assert (read.role, read.text, read.name) == ("user", "q", "ann")


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"temperature": -1}, InvalidRequest, "temperature"),
        ({"temperature": float("nan")}, InvalidRequest, "temperature"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 1 << 21}, ContextLengthExceeded, "max_tokens"),
        ({"stop": ["a", ""]}, InvalidRequest, "stop.1"),
        ({"logit_bias": {"999": 1.0}}, InvalidRequest, "logit_bias"),
        ({"logit_bias": {"5": 101.0}}, InvalidRequest, "logit_bias.5"),
        ({"logit_bias": {"x": 1.0}}, InvalidRequest, "logit_bias"),
        ({"reuse": "maybe"}, InvalidRequest, "reuse"),
        ({"model": "gpt"}, ModelNotFound, "model"),
        ({"min_tokens": 9, "max_tokens": 3}, InvalidRequest, "min_tokens"),
        ({"speculation": "trace"}, UnsupportedParameter, "speculation"),
    ],
)
def test_bad_input_names_the_field(
    options: dict[str, Any], kind: type[RakvError], field: str, served: Served
) -> None:
    with pytest.raises(kind) as caught:
        served.client().chat("q", **options)

    assert type(caught.value) is kind
    assert caught.value.field == field


def test_an_error_that_quotes_much_is_still_that_error(served: Served) -> None:
    with pytest.raises(ModelNotFound) as caught:
        served.client().chat("q", model="m" * 50_000)

    assert caught.value.field == "model"


def test_half_a_character_is_refused_as_over_http(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        served.client().chat("half a pair: \ud83d")
    with pytest.raises(InvalidRequest, match="surrogates"):
        served.client().complete("half a pair: \ud83d")


def test_a_role_nobody_has_and_no_input_at_all(served: Served) -> None:
    with pytest.raises(InvalidRequest) as caught:
        served.client().chat([Message("boss", "x")])  # type: ignore[arg-type]  # on purpose
    assert caught.value.field == "messages.0.role"
    code, _, status = raw_call(served.target, "Generation/Generate", b"")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details(status, BadRequest()).field_violations[0].field == "input"


# --- outcomes


def raw_call(
    target: str, path: str, payload: bytes, **options: Any
) -> tuple[grpc.StatusCode, str, Status]:
    """Call a method that fails; its status, message and details."""
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/rakv.v1.{path}")
        with pytest.raises(grpc.RpcError) as caught:
            call(payload, timeout=30, **options)
    error = caught.value
    assert isinstance(error, grpc.Call)
    trailing = dict(error.trailing_metadata())
    return (
        error.code(),
        error.details() or "",
        Status.FromString(bytes(trailing.get(DETAILS_KEY, b""))),
    )


def details(status: Status, message: Any) -> Any:
    assert any(part.Unpack(message) for part in status.details)
    return message


def test_a_status_has_typed_details(served: Served) -> None:
    given_input = generation.Input(prompt="p")
    request = generation.GenerateRequest(input=given_input, temperature=9)

    code, message, status = raw_call(
        served.target, "Generation/Generate", request.SerializeToString()
    )

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (status.code, status.message) == (code.value[0], message)
    info = details(status, ErrorInfo())
    assert (info.reason, info.domain) == ("INVALID_REQUEST_ERROR", "rakv")


def test_a_defect_is_internal_and_tells_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RakvError, match="internal error") as caught:
        served.client().chat("raise a bug")

    assert "secret detail" not in str(caught.value)
    assert "secret detail" in caplog.text


def test_retry_information_reaches_the_client(served: Served) -> None:
    with pytest.raises(Overloaded, match="full") as caught:
        served.client().chat("be overloaded")
    assert caught.value.retry_after_s == 2.5


def test_bytes_that_are_no_message_are_the_callers_mistake(served: Served) -> None:
    code, _, _ = raw_call(served.target, "Generation/Generate", b"\xff\xff")
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_over_the_limit_is_refused(served: Served) -> None:
    code, _, _ = raw_call(served.target, "Generation/Generate", bytes(2 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_message_over_the_limit_is_not_sent_again(served: Served) -> None:
    waits: list[float] = []
    with (
        GrpcClient(served.target, sleep=waits.append) as client,
        pytest.raises(BodyTooLarge, match="larger than 1048576 bytes") as caught,
    ):
        client.chat("x" * (2 << 20))

    assert caught.value.field == "body"
    assert waits == []


@pytest.mark.parametrize(
    "message",
    ["Concurrent RPC limit exceeded!", "CLIENT: Received message larger than max (9 vs. 8)"],
)
def test_other_limits_of_grpc_are_not_taken_for_it(message: str) -> None:
    error = error_from(grpc.StatusCode.RESOURCE_EXHAUSTED, message, b"")
    assert type(error) is Overloaded


def test_an_unknown_method_is_unimplemented(served: Served) -> None:
    code, _, _ = raw_call(served.target, "Generation/Nothing", b"")
    assert code is grpc.StatusCode.UNIMPLEMENTED


def until(condition: Any, what: str) -> None:
    for _ in range(1500):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError(what)


def test_a_deadline_ends_the_work(fresh: Served) -> None:
    fresh.backend.hold()

    with pytest.raises(DeadlineExceeded):
        fresh.client(timeout_s=1.0).chat("q")
    # On a machine that stands still for that second it may never have begun.
    until(
        lambda: len(fresh.backend.cancelled) == len(fresh.backend.requests),
        "the engine's work goes on",
    )


def test_leaving_a_stream_ends_the_work(fresh: Served) -> None:
    fresh.backend.hold()
    with fresh.client().stream_chat("q") as stream:
        assert next(stream)

    until(lambda: len(fresh.backend.cancelled) == 1, "the engine's work goes on")


def test_no_server_is_unavailable() -> None:
    with (
        GrpcClient("127.0.0.1:1", retries=NO_RETRIES) as client,
        pytest.raises(Unavailable),
    ):
        client.chat("q")


def test_many_at_once(served: Served) -> None:
    client = served.client()
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: client.chat(f"question {i}", seed=i), range(64)))
    assert {a.text for a in answers} == {"Grüße, 世界 🌍"}


def _documented() -> list[type[RakvError]]:
    kinds = [getattr(errors, name) for name in dir(errors)]
    return [k for k in kinds if isinstance(k, type) and issubclass(k, RakvError)]


@pytest.mark.parametrize("kind", _documented(), ids=lambda k: k.__name__)
def test_every_error_comes_back_as_itself(kind: type[RakvError]) -> None:
    error = kind("words", field="f", retry_after_s=1.25)

    again = error_from(status_code(error), "words", details_of(error))

    assert again.code == error.code
    assert (again.message, again.field, again.retry_after_s) == ("words", "f", 1.25)


def test_a_strangers_status_goes_by_its_code() -> None:
    assert type(error_from(grpc.StatusCode.UNAVAILABLE, "x", b"\xff")) is Unavailable
    assert type(error_from(grpc.StatusCode.DATA_LOSS, "", b"")) is RakvError


ALLOWED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
TOLD = {"Generation/Generate", "Cache/Warm", "Cache/Lookup", "Cache/Pin", "Cache/Unpin",
        "Cache/Evict", "Cache/Stats"}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from(sorted(TOLD)),
    payload=st.one_of(
        st.binary(max_size=60),
        st.builds(
            lambda role, text, t, n, bias, stop: generation.GenerateRequest(
                input=generation.Input(
                    chat=generation.Chat(messages=[generation.Message(role=role, content=text)]),
                    documents=[generation.Document(id=text[:3], text=text)],
                ),
                temperature=t, n=n, logit_bias=bias, stop=stop, max_tokens=3,
            ).SerializeToString(),
            st.sampled_from(["user", "system", "x", ""]),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
            st.floats(),
            st.integers(0, 40),
            st.dictionaries(st.integers(0, 2**32 - 1), st.floats(), max_size=2),
            st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=3),
        ),
    ),
)  # fmt: skip
def test_no_message_makes_a_defect(served: Served, path: str, payload: bytes) -> None:
    with grpc.insecure_channel(served.target) as channel:
        try:
            channel.unary_unary(f"/rakv.v1.{path}")(payload, timeout=30)
        except grpc.RpcError as error:
            code = error.code()
    if "code" in locals():
        assert code in ALLOWED


# --- the cache


def prompt_keys(served: Served) -> tuple[bytes, ...]:
    """Keys of the prompt that the backend saw last."""
    return tuple(chunk.prefix_key for chunk in served.backend.requests[-1].prompt.chunks)


def test_lookup_pin_unpin_and_evict_concern_the_prompts_own_chunks(fresh: Served) -> None:
    client = fresh.client()
    warmed = client.warm("q", documents=DOCUMENTS)
    keys = prompt_keys(fresh)
    fresh.hold(keys, "n0")
    fresh.hold(keys[:1], "n1")

    found = client.lookup("q", documents=DOCUMENTS)
    pinned = client.pin("q", documents=DOCUMENTS, owner="me", ttl_s=60)
    ended = client.unpin("q", documents=DOCUMENTS, owner="me")
    removed = client.evict("q", documents=DOCUMENTS)
    after = client.lookup("q", documents=DOCUMENTS)

    assert warmed.usage.output_tokens == 1
    assert len(keys) > 2
    assert [list(c.nodes) for c in found.chunks] == [["n0", "n1"], *[["n0"]] * (len(keys) - 1)]
    assert found.chunks[0].start == 0
    assert found.stored_tokens == found.chunks[-1].end <= found.prompt_tokens
    assert (pinned.pinned_chunks, pinned.prompt_chunks) == (len(keys), len(keys))
    assert (ended.ended_pins, removed.removed_records) == (len(keys) + 1, len(keys) + 1)
    assert after.stored_tokens == 0


def test_a_gap_ends_what_is_stored(fresh: Served) -> None:
    client = fresh.client()
    client.warm("q", documents=DOCUMENTS)
    keys = prompt_keys(fresh)
    fresh.hold((keys[0], *keys[2:]), "n0")

    found = client.lookup("q", documents=DOCUMENTS)

    assert found.stored_tokens == found.chunks[0].end
    assert [bool(c.nodes) for c in found.chunks[:3]] == [True, False, True]


def test_stats_tell_each_nodes_sizes(fresh: Served) -> None:
    client = fresh.client()
    client.warm("q", documents=DOCUMENTS)
    fresh.hold(prompt_keys(fresh), "n1")

    stats = client.stats()

    assert set(stats.shards_by_node) == set(NODES)
    assert stats.shards_by_node["n1"].records == len(prompt_keys(fresh))
    assert "engine_running" in stats.replica


def test_a_node_that_does_not_answer_is_left_out(fresh: Served) -> None:
    fresh.shards.faults["n1"] = Fault.GONE
    assert set(fresh.client().stats().shards_by_node) == {"n0"}


@pytest.mark.parametrize(("owner", "ttl_s"), [("", 1), ("x" * 65, 1), ("me", 0), ("me", 1e9)])
def test_a_pin_needs_an_owner_and_an_end(owner: str, ttl_s: float, served: Served) -> None:
    with pytest.raises(InvalidRequest) as caught:
        served.client().pin("q", owner=owner, ttl_s=ttl_s)
    assert caught.value.field in {"owner", "ttl_s"}


# --- access


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    made = {name: new_key(name, admin=name == "root") for name in ("alpha", "beta", "root")}
    limits = {"beta": TenantLimits(requests_per_minute=2)}
    write_table(tmp_path / "keys", KeyTable({e.id: e for _, e in made.values()}, limits))
    keys = {name: key for name, (key, _) in made.items()}
    for served in serve(Settings(api_keys_file=tmp_path / "keys")):
        yield served, keys


def test_every_method_needs_a_key(keyed: tuple[Served, dict[str, str]]) -> None:
    served, keys = keyed
    for method in methods():
        if not method.streams:
            path = method.path.removeprefix("/rakv.v1.")
            code, _, _ = raw_call(served.target, path, b"")
            assert code is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(Unauthenticated):
        served.client(api_key=keys["alpha"] + "x").chat("q")
    with pytest.raises(Unauthenticated), served.client().stream_chat("q") as stream:
        next(stream)
    assert served.backend.requests == []


def test_tenants_share_nothing_and_cannot_operate(keyed: tuple[Served, dict[str, str]]) -> None:
    served, keys = keyed
    alpha, root = served.client(api_key=keys["alpha"]), served.client(api_key=keys["root"])
    alpha.warm("q", documents=DOCUMENTS)
    served.hold(prompt_keys(served), "n0")

    assert alpha.lookup("q", documents=DOCUMENTS).stored_tokens > 0
    assert root.lookup("q", documents=DOCUMENTS).stored_tokens == 0
    assert root.evict("q", documents=DOCUMENTS).removed_records == 0
    assert root.chat("q", documents=DOCUMENTS).cached_tokens == 0
    for refused in (
        lambda: alpha.pin("q", owner="me", ttl_s=1),
        lambda: alpha.unpin("q", owner="me"),
        lambda: alpha.evict("q"),
        alpha.stats,
    ):
        with pytest.raises(PermissionDenied):
            refused()


def test_limits_hold_here_too(keyed: tuple[Served, dict[str, str]]) -> None:
    served, keys = keyed
    beta = served.client(api_key=keys["beta"])
    beta.chat("one")
    beta.chat("two")

    with pytest.raises(Overloaded, match="requests per minute") as caught:
        beta.chat("three")
    assert caught.value.retry_after_s == pytest.approx(30.0)


# --- the server


def test_health_and_reflection_answer_without_a_key(
    keyed: tuple[Served, dict[str, str]],
) -> None:
    served, _ = keyed
    with grpc.insecure_channel(served.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "rakv.v1.Generation", "rakv.v1.Cache"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        shown = ProtoReflectionDescriptorDatabase(channel)
        services = set(shown.get_services())
        file = shown.FindFileContainingSymbol("rakv.v1.Generation")

    assert {"rakv.v1.Generation", "rakv.v1.Cache", "grpc.health.v1.Health"} <= services
    assert file.name == "rakv/v1/generation.proto"


async def test_a_port_in_use_is_an_error_that_names_it(served: Served) -> None:
    port = int(served.target.rsplit(":", 1)[1])
    service = scripted_service(ScriptedBackend(), Settings(), ManualClock())
    metrics = ServiceMetrics()
    admin = StoreAdmin(served.shards, lambda: NODES, ManualClock())
    surface = GrpcSurface(service, metrics, CacheApi(service, metrics, admin), OneReplica())

    with pytest.raises(ConfigError, match=str(port)):
        await GrpcServer.start(surface, Settings(), port)


async def test_stopping_tells_health_checks_and_lets_calls_end() -> None:
    backend = ScriptedBackend()
    service, metrics = scripted_service(backend, Settings(), ManualClock()), ServiceMetrics()
    shards = SimulatedShards([], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, tuple, ManualClock())
    surface = GrpcSurface(service, metrics, CacheApi(service, metrics, admin), OneReplica())
    server = await GrpcServer.start(surface, Settings(), 0)
    backend.hold()
    request = generation.GenerateRequest(input=generation.Input(prompt="p"))

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary("/rakv.v1.Generation/Generate")(request.SerializeToString())
        await asyncio.wait_for(backend.started.wait(), 10)
        stopping = asyncio.create_task(server.stop())
        backend.go_on()
        response = generation.GenerateResponse.FromString(await call)
        await stopping

    assert response.choices[0].text == "answer"


@pytest.mark.parametrize("message", [cache.PinRequest, generation.GenerateRequest])
def test_field_numbers_are_never_reused(message: Any) -> None:
    numbers = [field.number for field in message.DESCRIPTOR.fields]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_token_ids_are_a_prompt_too(fresh: Served) -> None:
    client = fresh.client()
    client.complete("prompt")
    by_text = fresh.backend.requests[-1].prompt
    given_input = generation.Input(token_ids=generation.TokenIds(ids=by_text.token_ids))
    request = generation.GenerateRequest(input=given_input, speculation="off")

    with grpc.insecure_channel(fresh.target) as channel:
        channel.unary_unary("/rakv.v1.Generation/Generate")(request.SerializeToString())

    assert fresh.backend.requests[-1].prompt == by_text
    assert fresh.backend.requests[-1].speculation == "off"
