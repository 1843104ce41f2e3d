"""What an ingress hands its router with a request, and what it hears back.

A router called through a deployment handle sees the caller's own objects, so a ticket works in
both directions within the ingress's process. What arrives at the replica is an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.routing.locations import Holders
from rakv_cluster.routing.policy import Decision, RouteRequest
from rakv_cluster.types import ReuseMode


class Fallback(str, Enum):
    """Why a router did not use the score."""

    FAILED = "score_failed"
    LATE = "score_late"


@dataclass(slots=True)
class RouteTicket:
    """Hints for the router, and its answers: how it decided the last time it was asked, by which
    ``reason``, and the ``replica`` that took the request, once one has.

    ``output_tokens`` is the expected length of the answer, ``holders`` what the directory knows.
    A ``trial`` is always scored, and not booked. Replicas to ``avoid`` are not chosen where there
    are others. Whoever makes the call closes its ticket when it is over.
    """

    output_tokens: float = 128.0
    holders: Holders = ()
    trial: bool = False
    avoid: frozenset[str] = frozenset()
    decided: tuple[Decision, ...] = ()
    reason: str = ""
    replica: str = ""
    _closed: bool = field(default=False, init=False)
    _on_close: list[Callable[[], object]] = field(default_factory=list, init=False)

    def close(self) -> None:
        """The call is over, however it ended. Any thread."""
        self._closed = True
        for act in self._on_close:
            act()

    def on_close(self, act: Callable[[], object]) -> None:
        """``act`` once the call is over, in the thread that closes the ticket; at once if it is.

        Where that happens at the same time, it is called twice.
        """
        self._on_close.append(act)
        if self._closed:
            act()

    @property
    def went(self) -> frozenset[str]:
        """The replica that has the request or, until one has, the one that was chosen for it."""
        chosen = [self.replica] if self.replica else [each.order[0] for each in self.decided]
        return frozenset(chosen)

    def scored(self, decision: Decision) -> None:
        """The score decided."""
        self.decided, self.reason = (decision,), decision.reason.value

    def fell_back(self, why: Fallback) -> None:
        """The score was not used."""
        self.decided, self.reason = (), why.value

    def __reduce__(self) -> tuple[object, ...]:
        return (RouteTicket, ())


def route_request(request: EngineRequest, ticket: RouteTicket) -> RouteRequest:
    """What a router needs of an engine's request: tokens already sent are computed like a
    prompt's."""
    chunks = request.prompt.chunks if request.reuse is not ReuseMode.OFF else ()
    return RouteRequest(
        request_id=request.request_id,
        keys=tuple(chunk.prefix_key for chunk in chunks),
        chunk_ends=np.fromiter((chunk.end for chunk in chunks), np.int64, len(chunks)),
        prompt_tokens=len(request.prompt.token_ids) + len(request.forced_ids),
        output_tokens=max(ticket.output_tokens - len(request.forced_ids), 1.0),
        kind=work_kind(request),
        holders=ticket.holders,
    )


def work_kind(request: EngineRequest) -> str:
    """By what pace is reported."""
    return f"{request.endpoint}/{request.tenant}"
