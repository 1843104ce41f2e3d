"""Spans of ended requests, through the HTTP application to an exporter in memory."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rakv_cluster.config import Settings
from rakv_cluster.engine.request import RequestStats
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.recent import RequestLine
from rakv_cluster.serving.tracing import NO_TRACES, OtelTracer, open_tracer
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service

ASK = {"messages": [{"role": "user", "content": "question " * 40}], "max_tokens": 8}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> OtelTracer:
    return OtelTracer(SimpleSpanProcessor(exporter), "rakv")


async def test_a_request_becomes_a_child_of_its_callers_span(
    exporter: InMemorySpanExporter, tracer: OtelTracer
) -> None:
    service = scripted_service(ScriptedBackend(), Settings(), ManualClock(), tracer=tracer)
    transport = httpx.ASGITransport(create_app(service, ServiceMetrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        response = await http.post("/v1/chat/completions", json=ASK, headers=headers)
        await http.post("/v1/chat/completions", json=ASK, headers={"traceparent": "nonsense"})

    first, second = exporter.get_finished_spans()
    assert response.status_code == 200
    assert (first.name, f"{first.context.trace_id:032x}") == ("rakv.request", TRACE)
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == PARENT
    assert first.attributes is not None
    assert first.attributes["rakv.prompt_tokens.computed"] > 0
    assert second.parent is None


def test_phases_follow_each_other_and_fill_the_requests_end(
    exporter: InMemorySpanExporter, tracer: OtelTracer
) -> None:
    line = RequestLine("r", 100.0, "chat", "deadline_exceeded", "exact", {}, 0, {}, 0, 0, 50, False)
    tracer.ended(line, RequestStats(queue_ms=5, load_ms=0, prefill_ms=20, decode_ms=10), "")

    queue, prefill, decode, root = exporter.get_finished_spans()
    assert [s.name for s in (queue, prefill, decode)] == [
        "rakv.queue",
        "rakv.prefill",
        "rakv.decode",
    ]
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time == root.end_time == 100 * 10**9
    assert root.end_time - root.start_time == 50 * 10**6
    assert not root.status.is_ok


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert open_tracer("", "rakv") is NO_TRACES


def test_an_endpoint_that_does_not_answer_costs_requests_nothing() -> None:
    tracer = open_tracer("http://127.0.0.1:9/v1/traces", "rakv")
    assert tracer is not NO_TRACES
    line = RequestLine("r", 100.0, "chat", "ok", "exact", {}, 0, {}, 0, 0.0, 50.0, False)

    tracer.ended(line, RequestStats(), "")
    tracer.close()
