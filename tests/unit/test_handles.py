"""Calls by deployment handle, on a stand-in for Serve's: what a router hears, and what is counted.

The handle itself runs in tests/integration/test_serve_cluster.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from rakv_cluster.chunking.keys import tail_key
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.errors import Overloaded, Unavailable
from rakv_cluster.routing.output_length import OutputLengths
from rakv_cluster.routing.policy import RoutePolicy, RouteSettings
from rakv_cluster.routing.ticket import Fallback, RouteTicket, route_request
from rakv_cluster.serving.backend import Failover
from rakv_cluster.serving.handles import HandleBackend
from rakv_cluster.serving.hedging import HedgePolicy
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.types import ChunkedPrompt, FinishReason

Serves = Callable[[int, RouteTicket], Awaitable[FinishReason | None]]
PROMPT = ChunkedPrompt(bytes(32), (1, 2, 3), (), 0, tail_key(bytes(32), bytes(32)))
REQUEST = EngineRequest("r", PROMPT, max_tokens=3)


@dataclass
class Handle:
    """Serve's handle to replicas that each do what ``serves`` says and then say one token."""

    serves: Serves
    calls: list[tuple[EngineRequest, RouteTicket]] = field(default_factory=list)
    over: list[str] = field(default_factory=list)

    def options(self, **_: object) -> Handle:
        return self

    def remote(self, request: EngineRequest, ticket: RouteTicket) -> Call:
        self.calls.append((request, ticket))
        ticket.on_close(lambda: self.over.append(request.request_id))
        return Call(self._events(len(self.calls), request, ticket))

    async def _events(
        self, call: int, request: EngineRequest, ticket: RouteTicket
    ) -> AsyncGenerator[EngineEvent, None]:
        finish = await self.serves(call, ticket)
        yield EngineEvent(request.request_id, (call,), finish=finish)


@dataclass
class Call:
    """What the handle returns."""

    events: AsyncGenerator[EngineEvent, None]

    def __aiter__(self) -> AsyncGenerator[EngineEvent, None]:
        return self.events

    def __await__(self) -> Generator[Any, None, EngineEvent]:
        return anext(self.events).__await__()

    def cancel(self) -> None:
        """The real one may be cancelled when it has ended."""


def backend(handle: Handle, metrics: ServiceMetrics, hedging: HedgePolicy) -> HandleBackend:
    subject: Any = handle
    return HandleBackend(
        subject, metrics, ManualClock(), hedging, lengths=OutputLengths(), explain_timeout_s=0.05
    )


def routed(ticket: RouteTicket, replica: str) -> None:
    """What the router does: it decides, and Serve finds a replica, not always its first choice."""
    policy = RoutePolicy(RouteSettings(), ManualClock(), np.random.default_rng(0))
    policy.view.set_replicas({"a": "n1", "b": "n1"}, policy.now_s)
    ticket.scored(policy.decide(route_request(REQUEST, ticket)))
    ticket.replica = replica


def reasons(metrics: ServiceMetrics) -> dict[str, float]:
    """Requests counted, by reason."""
    samples = next(iter(metrics.routed.collect())).samples
    return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total") and s.value}


async def test_a_request_is_counted_once_by_what_stood_and_its_ticket_closed() -> None:
    async def serve(_: int, ticket: RouteTicket) -> None:
        routed(ticket, "")  # the replica was full, and the next time the score rested
        ticket.fell_back(Fallback.LATE)
        ticket.replica = "b"

    handle, metrics = Handle(serve), ServiceMetrics()
    events = backend(handle, metrics, HedgePolicy(0.0)).generate(REQUEST)
    assert [event.token_ids async for event in events] == [(1,)]
    assert reasons(metrics) == {"score_late": 1}
    assert handle.over == ["r"]


async def test_who_leaves_while_it_waits_closes_the_ticket_and_counts_nowhere() -> None:
    waiting = asyncio.Event()

    async def serve(_: int, ticket: RouteTicket) -> None:
        routed(ticket, "")
        waiting.set()
        await asyncio.Event().wait()

    handle, metrics = Handle(serve), ServiceMetrics()
    events = backend(handle, metrics, HedgePolicy(0.0)).generate(REQUEST)
    reading = asyncio.ensure_future(anext(events))
    await waiting.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert handle.over == ["r"]
    assert reasons(metrics) == {}


async def test_a_full_queue_closes_the_ticket() -> None:
    async def serve(_: int, ticket: RouteTicket) -> None:
        raise BackPressureError(num_queued_requests=9, max_queued_requests=9)

    handle, metrics = Handle(serve), ServiceMetrics()
    with pytest.raises(Overloaded):
        await anext(backend(handle, metrics, HedgePolicy(0.0)).generate(REQUEST))
    assert handle.over == ["r"]
    assert reasons(metrics) == {}


@pytest.mark.parametrize("took", ["a", "b"])
async def test_a_hedge_avoids_the_replica_that_took_the_first(took: str) -> None:
    async def serve(call: int, ticket: RouteTicket) -> None:
        routed(ticket, took)
        if call == 1:
            await asyncio.Event().wait()

    hedging = HedgePolicy(0.5)
    for _ in range(100):
        hedging.observe(0.0)
        hedging.after_s()
    handle = Handle(serve)
    events = backend(handle, ServiceMetrics(), hedging).generate(REQUEST)
    assert [event.token_ids async for event in events] == [(2,)]
    (_, first), (second_request, second) = handle.calls
    assert first.avoid == frozenset()
    assert second.avoid == {took}
    assert sorted(handle.over) == ["r", second_request.request_id]


@pytest.mark.parametrize("fault", ["no memory", "lost", "lost before it took it"])
async def test_the_next_attempt_goes_elsewhere(fault: str) -> None:
    """Its KV is where it failed, so that the score alone would send it there again."""

    async def serve(call: int, ticket: RouteTicket) -> FinishReason:
        routed(ticket, "" if "before" in fault else "a")
        if call == 2:
            return FinishReason.LENGTH
        if fault == "no memory":
            return FinishReason.NO_MEMORY
        raise ActorUnavailableError("out of reach", b"0" * 16)

    handle, metrics = Handle(serve), ServiceMetrics()
    subject = backend(handle, metrics, HedgePolicy(0.0))
    events = Failover(subject, ManualClock(), metrics).generate(REQUEST)
    assert [event.token_ids async for event in events] == [(2,)]
    (_, first), (_, second) = handle.calls
    assert first.avoid == frozenset()
    assert second.avoid == first.went
    assert len(second.avoid) == 1
    assert not subject._failed_on


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_explanation_needs_no_answer_of_the_replica(hangs: bool) -> None:
    async def serve(_: int, ticket: RouteTicket) -> None:
        routed(ticket, "a")
        if hangs:
            await asyncio.Event().wait()

    subject = backend(Handle(serve), ServiceMetrics(), HedgePolicy(0.0))
    decision = await subject.explain(REQUEST)
    assert set(decision.ids) == {"a", "b"}


async def test_without_a_replica_there_is_no_explanation() -> None:
    async def serve(_: int, ticket: RouteTicket) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Unavailable):
        await backend(Handle(serve), ServiceMetrics(), HedgePolicy(0.0)).explain(REQUEST)
