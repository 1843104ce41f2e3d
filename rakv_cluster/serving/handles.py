"""The replicas behind a Serve handle, and Ray's exceptions in the terms of our tree."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.errors import Overloaded, RakvError, ReplicaLost, Unavailable
from rakv_cluster.model.card import ModelCard
from rakv_cluster.routing.locations import Holders
from rakv_cluster.routing.output_length import OutputLengths
from rakv_cluster.routing.policy import Decision
from rakv_cluster.routing.ticket import RouteTicket
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.types import FinishReason

_NATURAL_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})


def nowhere(keys: Sequence[bytes]) -> Holders:
    """The directory of a service without disks."""
    return ()


class HandleBackend:
    """A :class:`~rakv_cluster.serving.backend.Backend` over the Worker deployment.

    ``holders`` says which nodes hold keys on disk; with it and the lengths of former answers the
    router of the handle decides (:mod:`rakv_cluster.routing`).
    """

    def __init__(
        self,
        worker: DeploymentHandle,
        metrics: ServiceMetrics,
        holders: Callable[[Sequence[bytes]], Holders] = nowhere,
    ) -> None:
        self._worker = worker
        self._describe = worker.options(method_name="describe")
        self._generate = worker.options(method_name="generate", stream=True)
        self._metrics = metrics
        self._holders = holders
        self._lengths = OutputLengths()

    async def describe(self) -> ModelCard:
        with _translated():
            card: ModelCard = await self._describe.remote()
            return card

    async def stats(self) -> dict[str, Figures]:
        with _translated():
            answers = await self._worker.broadcast("stats").results_async(return_exceptions=True)
        # A replica that has just ended is no longer there to have figures.
        return {
            name: figures
            for answer in answers
            if not isinstance(answer, BaseException)
            for name, figures in answer.items()
        }

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        ticket = self._ticket(request)
        with _translated():
            events = self._generate.remote(request, ticket)
            try:
                async for event in events:
                    if event.finish in _NATURAL_ENDS and event.stats is not None:
                        tokens = event.stats.output_tokens
                        self._lengths.observe(request.endpoint, request.tenant, tokens)
                    yield event
            finally:
                # No effect on a call that has ended.
                events.cancel()
                for reason in ticket.reasons():
                    self._metrics.routed.labels(reason).inc()

    async def explain(self, request: EngineRequest) -> Decision:
        """How the score would decide on ``request`` now; nothing is generated.

        Raises :class:`Unavailable` if it cannot.
        """
        ticket = replace(self._ticket(request), trial=True)
        # From the handle that generates, so that it is the same router that is asked.
        ask = self._generate.options(method_name="route_only", stream=False)
        with _translated():
            await ask.remote(request, ticket)
        if not ticket.decisions:
            raise Unavailable(
                "requests are routed without a score (setting router), or it failed",
                retry_after_s=1.0,
            )
        return ticket.decisions[-1]

    def _ticket(self, request: EngineRequest) -> RouteTicket:
        keys = [chunk.prefix_key for chunk in request.prompt.chunks]
        expected = self._lengths.expected(request.endpoint, request.tenant, request.max_tokens)
        return RouteTicket(output_tokens=expected, holders=self._holders(keys))


@contextmanager
def _translated() -> Iterator[None]:
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
