"""Lines of JSON that tell of a request under one id, and never what was in it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from io import StringIO

import grpc
import httpx
import numpy as np
import pytest

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.logs import HEADER, REQUEST_ID, JsonLines, begin_request, configure_logs, fields
from rakv_cluster.rpc.v1 import generation_pb2 as generation
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.grpc_server import grpc_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

SECRET = "the secret of the prompt"


@pytest.fixture
def json_logs() -> Iterator[StringIO]:
    written = StringIO()
    configure_logs("json", written)
    yield written
    configure_logs("text")


def lines(written: StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


async def ask(backend: ScriptedBackend, headers: dict[str, str]) -> httpx.Response:
    app = scripted_app(backend, Settings(), ManualClock())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        body = {"messages": [{"role": "user", "content": SECRET}]}
        return await http.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_request_is_one_line_under_the_clients_id(
    json_logs: StringIO,
) -> None:
    backend = ScriptedBackend()

    response = await ask(backend, {HEADER: "abc-1"})

    assert response.headers[HEADER] == "abc-1"
    (line,) = lines(json_logs)
    assert line["request_id"] == backend.requests[0].trace_id == "abc-1"
    assert (line["message"], line["endpoint"], line["status"]) == ("request", "chat", "ok")
    assert line["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert str(line["id"]) in response.json()["id"]
    assert SECRET not in json.dumps(line)


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "a{b}"])
async def test_an_id_that_is_unfit_for_a_log_is_replaced(given: str) -> None:
    backend = ScriptedBackend()

    used = (await ask(backend, {HEADER: given})).headers[HEADER]

    assert used not in {"", given}
    assert used == backend.requests[0].trace_id


@pytest.mark.parametrize(("given", "says"), [("abc-1", False), ("a b", True)])
async def test_behind_a_proxy_that_sends_ids_back_only_another_id_is_added(
    given: str, says: bool
) -> None:
    service = scripted_service(ScriptedBackend(), Settings(), ManualClock())
    app = create_app(service, ServiceMetrics(), ids_echoed=True)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        response = await http.get("/v1/models", headers={HEADER: given})

    assert (HEADER in response.headers) is says


async def test_a_defect_is_logged_with_its_traceback_and_without_the_prompt(
    json_logs: StringIO,
) -> None:
    def fail(prompt: str) -> str:
        raise RuntimeError("a bug")

    response = await ask(ScriptedBackend(fail), {HEADER: "abc-2"})

    assert response.status_code == 500
    text = json.dumps(lines(json_logs))
    assert SECRET not in response.text + text


def test_grpc_takes_and_tells_the_id(json_logs: StringIO) -> None:
    backend = ScriptedBackend()
    shards = SimulatedShards([], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, tuple, ManualClock())
    request = generation.GenerateRequest(input=generation.Input(prompt=SECRET))
    with (
        grpc_server(lambda: scripted_service(backend, Settings(), ManualClock()), admin) as target,
        grpc.insecure_channel(target) as channel,
    ):
        _, call = channel.unary_unary("/rakv.v1.Generation/Generate").with_call(
            request.SerializeToString(), metadata=[(HEADER, "abc-3")], timeout=30
        )

    assert dict(call.initial_metadata())[HEADER] == backend.requests[0].trace_id == "abc-3"
    (line,) = lines(json_logs)
    assert (line["request_id"], line["endpoint"], line["status"]) == ("abc-3", "grpc", "ok")
    assert SECRET not in json.dumps(line)


def test_a_line_is_one_line_whatever_it_says() -> None:
    begin_request("id-1")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord(
            "rakv.x", logging.ERROR, __file__, 1, "said\n%s", ("ünï",), sys.exc_info()
        )
    for name, value in fields(count=3, path=object).items():
        setattr(record, name, value)

    (text,) = JsonLines().format(record).splitlines()
    REQUEST_ID.set("")

    line = json.loads(text)
    assert (line["message"], line["level"], line["request_id"]) == ("said\nünï", "error", "id-1")
    assert line["count"] == 3
    assert "ValueError: two\nlines" in line["exception"]


def test_configuring_twice_writes_once(json_logs: StringIO) -> None:
    configure_logs("json", json_logs)

    logging.getLogger("rakv_cluster.engine").info("once")

    assert [line["message"] for line in lines(json_logs)] == ["once"]
