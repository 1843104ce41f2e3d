"""What an ingress needs from the replicas, and what happens when one dies under a request."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import numpy as np

from rakv_cluster.clock import Clock
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.errors import (
    DeadlineExceeded,
    ReplicaLost,
    RequestRefused,
)
from rakv_cluster.model.card import ModelCard
from rakv_cluster.serving.first_event import begun
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.types import FinishReason


class Backend(Protocol):
    """The replicas of one model."""

    async def describe(self) -> ModelCard:
        """Identity and limits of the model; raises :class:`Unavailable` if no replica answers."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Events of one request up to the one with ``finish``.

        Closing the generator cancels the request within one engine step. Raises the error tree's
        classes, :class:`ReplicaLost` among them.
        """
        ...

    async def stats(self) -> dict[str, Figures]:
        """Figures of every replica that answers in time, by its name."""
        ...

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Remove KV from every replica's store, what is on its way there included.

        Waits for replicas that do not answer a bounded time, then for none.
        """
        ...


class PoisonList:
    """Digests of requests that ended two replicas, each for ``ttl_s``; bounded, oldest out."""

    def __init__(self, clock: Clock, *, ttl_s: float = 60.0, capacity: int = 256) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: EngineRequest) -> None:
        """Refuse this request from now on."""
        self._until_s[_digest(request)] = self._clock.monotonic_s() + self._ttl_s
        while len(self._until_s) > self._capacity:
            self._until_s.popitem(last=False)

    def check(self, request: EngineRequest) -> None:
        """Raise :class:`RequestRefused` for a request on the list."""
        if self._until_s and self._clock.monotonic_s() < self._until_s.get(_digest(request), 0.0):
            raise RequestRefused(
                f"two replicas ended while working on this request; it is refused for "
                f"{self._ttl_s:.0f} s"
            )


def _digest(request: EngineRequest) -> bytes:
    """Equal for requests that make a replica do the same work, whatever their ids and seeds."""
    ids = np.asarray(request.prompt.token_ids, dtype=np.int64)
    return hashlib.sha256(request.prompt.namespace + ids.tobytes()).digest()


class Failover:
    """A backend whose requests outlive a replica.

    When a replica dies, the tokens already sent become a forced prefix of the same request (same
    seed) on another one, so that the text goes on where it stopped and no token comes twice. What
    a blended request had got by then stays approximate, and the answer says so even if the other
    replica computes exactly. A replica that lives on, but has no memory for the request any more,
    is left in the same way.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        metrics: ServiceMetrics,
        *,
        attempts: int = 2,
        grace_s: float = 1.0,
    ) -> None:
        """``grace_s`` is how much later than a request's own time it ends where no replica says so:
        because none has taken it, or one hangs."""
        self._backend = backend
        self._clock = clock
        self._metrics = metrics
        self._attempts = attempts
        self._grace_s = grace_s
        self._poison = PoisonList(clock)

    async def describe(self) -> ModelCard:
        """As the backend does."""
        return await self._backend.describe()

    async def stats(self) -> dict[str, Figures]:
        """As the backend does."""
        return await self._backend.stats()

    async def forget(self, keys: Sequence[bytes]) -> None:
        """As the backend does."""
        await self._backend.forget(keys)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """As the backend does, but raises :class:`RequestRefused` where replica after replica was
        lost, and :class:`DeadlineExceeded` where none begins to answer in the request's time."""
        self._poison.check(request)
        deadline_s = self._clock.monotonic_s() + request.timeout_s
        sent, blended, deaths, before = list(request.forced_ids), False, 0, ""
        for attempt in range(self._attempts):
            remaining_s = deadline_s - self._clock.monotonic_s()
            if remaining_s <= 0:
                when = " while its replica was replaced" if attempt else ""
                raise DeadlineExceeded(f"the request's time ran out{when}")
            if attempt and len(sent) >= request.max_tokens:
                stats = RequestStats(
                    prompt_tokens=len(request.prompt.token_ids),
                    computed_tokens=len(request.prompt.token_ids),
                    output_tokens=len(sent),
                    resumed_blend=blended,
                )
                yield EngineEvent(request.request_id, (), finish=FinishReason.LENGTH, stats=stats)
                return
            part = replace(request, forced_ids=tuple(sent), timeout_s=remaining_s)
            if attempt:
                # A replica that was only out of reach still knows the first by its id.
                again = f"{request.request_id}-retry{attempt}"
                part = replace(part, request_id=again, after=before)
            before, here, last = part.request_id, False, attempt + 1 == self._attempts
            try:
                attempt_events = begun(self._backend.generate(part), remaining_s + self._grace_s)
                async with aclosing(attempt_events) as events:
                    async for event in events:
                        if event.finish is FinishReason.NO_MEMORY and not last:
                            break  # another replica may have some, or the same one again
                        sent += event.token_ids
                        here |= event.stats is not None and event.stats.approximate
                        yield _labelled(event) if blended else event
                        if event.finish is not None:
                            return
            except ReplicaLost:
                deaths += 1
                if last and deaths < self._attempts:
                    raise
            self._metrics.retries.inc()
            blended |= here
        self._poison.add(request)
        self._poison.check(request)


def _labelled(event: EngineEvent) -> EngineEvent:
    """The event of a stream that began blended, elsewhere."""
    if event.stats is None:
        return event
    return replace(event, stats=replace(event.stats, resumed_blend=True))
