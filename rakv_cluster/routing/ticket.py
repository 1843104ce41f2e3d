"""What an ingress hands its router with a request, and what it hears back.

A router called through a deployment handle sees the caller's own objects, so a ticket works in
both directions within the ingress's process. What arrives at the replica is an empty one.
"""

from __future__ import annotations

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
    """Hints for the router; ``decisions`` and ``fallbacks`` are its answers, newest last.

    ``output_tokens`` is the expected length of the answer, ``holders`` what the directory knows.
    A ``trial`` is always scored, and not booked. Replicas to ``avoid`` are not chosen by the score
    where there are others.
    """

    output_tokens: float = 128.0
    holders: Holders = ()
    trial: bool = False
    avoid: frozenset[str] = frozenset()
    decisions: list[Decision] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)

    def reasons(self) -> list[str]:
        """Why the router did what it did, by name; more than one if it was asked again."""
        return [each.value for each in self.fallbacks] + [
            each.reason.value for each in self.decisions
        ]

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
