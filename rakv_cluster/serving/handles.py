"""The replicas behind a Serve handle, and Ray's exceptions in the terms of our tree."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from rakv_cluster.clock import Clock
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.errors import Overloaded, RakvError, ReplicaLost, Unavailable
from rakv_cluster.model.card import ModelCard
from rakv_cluster.routing.locations import Holders
from rakv_cluster.routing.output_length import OutputLengths
from rakv_cluster.routing.policy import Decision
from rakv_cluster.routing.ticket import RouteTicket
from rakv_cluster.serving.hedging import HedgePolicy, hedged
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.types import FinishReason

log = logging.getLogger(__name__)

_FORGET_TIMEOUT_S = 10.0
_STATS_TIMEOUT_S = 1.5
"""Less than those wait who want them all."""

_MAX_FAILED = 1024

T = TypeVar("T")


def nowhere(keys: Sequence[bytes]) -> Holders:
    """The directory of a service without disks."""
    return ()


class HandleBackend:
    """A :class:`~rakv_cluster.serving.backend.Backend` over the Worker deployment.

    ``holders`` says which nodes hold keys on disk; with it and the ``lengths`` of former answers,
    learned where these end, the router of the handle decides (:mod:`rakv_cluster.routing`). What
    is late is dispatched again as ``hedging`` says, to another replica.
    """

    def __init__(
        self,
        worker: DeploymentHandle,
        metrics: ServiceMetrics,
        clock: Clock,
        hedging: HedgePolicy,
        *,
        lengths: OutputLengths,
        holders: Callable[[Sequence[bytes]], Holders] = nowhere,
        explain_timeout_s: float = 5.0,
    ) -> None:
        self._explain_timeout_s = explain_timeout_s
        self._clock = clock
        self._hedging = hedging
        self._worker = worker
        self._describe = worker.options(method_name="describe")
        self._generate = worker.options(method_name="generate", stream=True)
        self._metrics = metrics
        self._holders = holders
        self._lengths = lengths
        self._failed_on: OrderedDict[str, frozenset[str]] = OrderedDict()

    async def describe(self) -> ModelCard:
        with translated():
            card: ModelCard = await self._describe.remote()
            return card

    async def stats(self) -> dict[str, Figures]:
        with translated():
            asked = self._worker.broadcast("stats")
            # What is public waits for all replicas or has none: one that hangs would hide all.
            calls = await asked._fetch_replica_results_async()
        answers = await in_time([call.get_async() for call in calls], _STATS_TIMEOUT_S)
        self._metrics.unreachable.set(len(calls) - len(answers))
        return {name: figures for answer in answers for name, figures in answer.items()}

    async def forget(self, keys: Sequence[bytes]) -> None:
        with translated():
            answers = self._worker.broadcast("forget", list(keys))
            try:
                # One that ends meanwhile has nothing to forget any more.
                await answers.results_async(timeout_s=_FORGET_TIMEOUT_S, return_exceptions=True)
            except TimeoutError:
                log.warning("a replica has not said in time that it forgot %d keys", len(keys))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        ticket = self._ticket(request)
        events = self._attempt(request, ticket)
        after_s = self._hedging.after_s()
        if math.isfinite(after_s):
            again = partial(self._again, request, ticket)
            events = hedged(events, after_s, again, self._count_hedge)
        started_s = self._clock.monotonic_s()
        spoken = False
        async with aclosing(events):
            async for event in events:
                if not spoken:
                    self._hedging.observe(self._clock.monotonic_s() - started_s)
                    spoken = True
                yield event

    async def _attempt(
        self, request: EngineRequest, ticket: RouteTicket
    ) -> AsyncGenerator[EngineEvent, None]:
        try:
            with translated():
                events = self._generate.remote(request, ticket)
                try:
                    async for event in events:
                        if event.finish is FinishReason.NO_MEMORY:
                            self._remember(request, ticket)
                        yield event
                finally:
                    # No effect on a call that has ended.
                    events.cancel()
                    ticket.close()
                    if ticket.replica and ticket.reason:
                        self._metrics.routed.labels(ticket.reason).inc()
        except ReplicaLost:
            self._remember(request, ticket)
            raise

    def _remember(self, request: EngineRequest, ticket: RouteTicket) -> None:
        """Where a request failed: its next attempt, if it has one, goes elsewhere."""
        self._failed_on[request.request_id] = ticket.went
        while len(self._failed_on) > _MAX_FAILED:
            self._failed_on.popitem(last=False)

    def _again(
        self, request: EngineRequest, ticket: RouteTicket
    ) -> Sequence[AsyncGenerator[EngineEvent, None]]:
        """A dispatch to another replica than the one that ``ticket`` led to, if there is one."""
        if not any(len(each.ids) > 1 for each in ticket.decided) or not self._hedging.take():
            return ()
        other = self._ticket(request)
        other.avoid = ticket.avoid | ticket.went
        # Its replica may come to hold both, and knows requests by their ids.
        second = replace(request, request_id=f"{request.request_id}-hedge")
        return (self._attempt(second, other),)

    def _count_hedge(self, second: bool) -> None:
        self._metrics.hedged.labels("second" if second else "first").inc()

    async def explain(self, request: EngineRequest) -> Decision:
        """How the score would decide on ``request`` now; nothing is generated.

        Raises :class:`Unavailable` if it cannot.
        """
        ticket = replace(self._ticket(request), trial=True)
        # From the handle that generates, so that it is the same router that is asked.
        ask = self._generate.options(method_name="route_only", stream=False)
        with translated():
            asked = ask.remote(request, ticket)
            try:
                await asyncio.wait_for(asked, self._explain_timeout_s)
            except asyncio.TimeoutError:
                asked.cancel()  # the replica hangs: its router has decided all the same
        if not ticket.decided:
            raise Unavailable(
                "requests are routed without a score (setting router), it failed, or no replica "
                "is there",
                retry_after_s=1.0,
            )
        return ticket.decided[0]

    def _ticket(self, request: EngineRequest) -> RouteTicket:
        keys = [chunk.prefix_key for chunk in request.prompt.chunks]
        expected = self._lengths.expected(request.endpoint, request.tenant, request.max_tokens)
        return RouteTicket(
            output_tokens=expected,
            holders=self._holders(keys),
            avoid=self._failed_on.pop(request.after, frozenset()),
        )


async def in_time(calls: Sequence[Awaitable[T]], timeout_s: float) -> list[T]:
    """What those of ``calls`` return that are done within ``timeout_s`` and do not fail; the others
    are cancelled."""
    if not calls:
        return []
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()
    return [
        task.result()
        for task in tasks
        if task in done and not task.cancelled() and task.exception() is None
    ]


@contextmanager
def translated() -> Iterator[None]:
    """Raise what Ray raises as one of ours; an exception of ours comes out of its wrapping."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RakvError):
            raise error.cause from None
        raise RakvError("the replica failed on this request; its log says more") from error
    except BackPressureError as error:
        raise Overloaded("too many requests wait for a replica", retry_after_s=1.0) from error
    except DeploymentUnavailableError as error:
        raise Unavailable("no replica can be started", retry_after_s=5.0) from error
    except (RayActorError, ActorUnavailableError, ReplicaUnavailableError) as error:
        raise ReplicaLost("the replica is gone", retry_after_s=1.0) from error
