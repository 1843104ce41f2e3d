"""Calls to shards: many at once, each bounded in time, a failing shard left alone.

Fault contract: :meth:`Peers.ask` never raises for what becomes of a call. A shard that is dead,
slow, raises or answers garbage gives a :class:`Failed`, and a counter says which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.breaker import BreakerLimits, CircuitBreaker
from rakv_cluster.store.counters import Counters

T = TypeVar("T")


class Failure(str, Enum):
    """Why a call has no usable answer. ``RESTING``: not sent, the shard's breaker is open."""

    LATE = "late"
    GONE = "gone"
    RAISED = "raised"
    GARBAGE = "garbage"
    RESTING = "resting"


@dataclass(frozen=True, slots=True)
class Call:
    """Call ``method`` of the shard actor on ``node``."""

    node: str
    method: str
    args: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a shard answered."""

    value: T


@dataclass(frozen=True, slots=True)
class Failed:
    """A call without a usable answer."""

    failure: Failure


class Transport(Protocol):
    """How calls travel. Used from any thread."""

    def call(self, calls: Sequence[Call], timeout_s: float) -> list[Answer[object] | Failed]:
        """All ``calls`` at once; returns when all are answered or after ``timeout_s``, in order.

        Raises nothing for a call that failed; one that is late is cancelled where possible.
        """
        ...


class Peers:
    """The shards of the cluster as one process sees them. Used from any thread."""

    def __init__(self, transport: Transport, limits: BreakerLimits, clock: Clock) -> None:
        self._transport = transport
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._breakers: dict[str, CircuitBreaker] = {}
        self._counters = Counters(("calls_answered", *(f"calls_{f.value}" for f in Failure)))

    def set_nodes(self, nodes: Iterable[str]) -> None:
        """The nodes there are; what is known of others is forgotten."""
        live = set(nodes)
        with self._lock:
            self._breakers = {n: b for n, b in self._breakers.items() if n in live}

    def resting(self) -> set[str]:
        """Nodes that a call would not be sent to now."""
        with self._lock:
            return {node for node, breaker in self._breakers.items() if breaker.resting}

    def ask(
        self, calls: Sequence[Call], timeout_s: float, parse: Callable[[object], T]
    ) -> list[Answer[T] | Failed]:
        """Make ``calls`` at once, skipping shards at rest; one outcome per call, in order.

        ``parse`` checks an answer, since a shard may answer anything; it raises ``ValueError``
        for garbage.
        """
        with self._lock:
            resting = {n for n in {c.node for c in calls} if not self._breaker(n).allow()}
        sent = [call for call in calls if call.node not in resting]
        answers = iter(self._transport.call(sent, timeout_s) if sent else ())
        outcomes = [
            Failed(Failure.RESTING) if call.node in resting else _parsed(next(answers), parse)
            for call in calls
        ]
        with self._lock:
            for call, outcome in zip(calls, outcomes, strict=True):
                self._record(call, outcome)
        return outcomes

    def counters(self) -> dict[str, int]:
        """Calls by outcome since the start."""
        return self._counters.snapshot()

    def _record(self, call: Call, outcome: Answer[T] | Failed) -> None:
        if isinstance(outcome, Answer):
            self._breaker(call.node).success()
            self._counters.add("calls_answered")
            return
        self._counters.add(f"calls_{outcome.failure.value}")
        if outcome.failure is not Failure.RESTING:
            self._breaker(call.node).failure()

    def _breaker(self, node: str) -> CircuitBreaker:
        if node not in self._breakers:
            self._breakers[node] = CircuitBreaker(self._limits, self._clock)
        return self._breakers[node]


def _parsed(outcome: Answer[object] | Failed, parse: Callable[[object], T]) -> Answer[T] | Failed:
    if isinstance(outcome, Failed):
        return outcome
    try:
        return Answer(parse(outcome.value))
    except ValueError:
        return Failed(Failure.GARBAGE)
