"""Several choices of one request: they end together, in time, whatever ends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest

from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.openai_models import CompletionRequest, validated
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app, scripted_service
from rakv_cluster.types import FinishReason


class Failing(ScriptedBackend):
    """Has a defect that shows in choice ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().generate(request):
            if request.sampling.choice_index == self._number:
                raise RuntimeError("a defect")
            yield event


@pytest.mark.parametrize("number", [0, 1])
async def test_a_defect_in_one_choice_ends_the_request(number: int) -> None:
    app = scripted_app(Failing(number), Settings(), ManualClock())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        asked = http.post("/v1/completions", json={"prompt": "x", "n": 2})
        answer = await asyncio.wait_for(asked, 10)

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


async def test_a_defect_in_a_stream_is_told_at_its_end() -> None:
    app = scripted_app(Failing(1), Settings(), ManualClock())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        asked = {"prompt": "x", "n": 2, "stream": True}
        answer = await http.post("/v1/completions", json=asked)

    *pieces, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert all(json.loads(piece)["choices"] for piece in pieces)
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert "a defect" not in last


class Full(ScriptedBackend):
    """Its replica's device has no memory for any request."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield EngineEvent(request.request_id, (), finish=FinishReason.NO_MEMORY)


async def test_a_lack_of_memory_is_worth_another_try() -> None:
    transport = httpx.ASGITransport(scripted_app(Full(), Settings(), ManualClock()))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_defect_is_counted_as_one(n: int) -> None:
    service = scripted_service(Failing(0), Settings(), ManualClock())
    metrics = ServiceMetrics()
    transport = httpx.ASGITransport(create_app(service, metrics), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        asked = http.post("/v1/completions", json={"prompt": "x", "n": n})
        assert (await asyncio.wait_for(asked, 10)).status_code == 500

    counted = 'rakv_requests_total{endpoint="completions",status="internal_error"} 1.0'
    assert counted in metrics.render().decode()


async def test_the_length_of_an_answer_is_learned_however_it_ends() -> None:
    learned: list[tuple[str, int]] = []
    service = scripted_service(
        ScriptedBackend(lambda prompt: "an answer", step_tokens=1), Settings(), ManualClock(),
        ended=lambda endpoint, tenant, output_tokens: learned.append((endpoint, output_tokens)),
    )  # fmt: skip
    transport = httpx.ASGITransport(create_app(service, ServiceMetrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:

        async def length(**fields: object) -> int:
            answer = await http.post("/v1/completions", json={"prompt": "x"} | fields)
            return int(answer.json()["usage"]["completion_tokens"])

        whole, cut, stopped = [await length(), await length(max_tokens=2), await length(stop="sw")]
        both = await length(n=2)

    assert cut == 2 < stopped < whole
    assert both == 2 * whole
    lengths = [whole, cut, stopped, whole, whole]
    assert learned == [("completions", tokens) for tokens in lengths]


@pytest.mark.parametrize("n", [1, 2])
async def test_so_is_how_far_an_answer_came_before_its_client_left(n: int) -> None:
    learned: list[tuple[str, int]] = []
    backend = ScriptedBackend(lambda prompt: "an answer", step_tokens=3)
    backend.hold()
    service = scripted_service(
        backend, Settings(), ManualClock(),
        ended=lambda endpoint, tenant, output_tokens: learned.append((endpoint, output_tokens)),
    )  # fmt: skip
    prepared = await service.prepare(validated(CompletionRequest, {"prompt": "x", "n": n}))

    async with aclosing(service.run(prepared)) as updates:
        for _ in range(n):
            await anext(updates)

    assert learned == [("completions", 3)] * n


class Slow(ScriptedBackend):
    """The first choice takes ``first_s`` to its first token."""

    def __init__(self, clock: ManualClock, first_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._first_s = first_s

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        if request.sampling.choice_index == 0:
            self._clock.advance(self._first_s)
        async for event in super().generate(request):
            yield event


async def test_all_choices_share_the_requests_time() -> None:
    clock = ManualClock()
    backend = Slow(clock, 9.0)
    transport = httpx.ASGITransport(scripted_app(backend, Settings(), clock))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        body = {"prompt": "x", "n": 3, "timeout_s": 10}
        assert (await http.post("/v1/completions", json=body)).status_code == 200

    assert [request.timeout_s for request in backend.requests] == [10.0, 1.0, 1.0]
