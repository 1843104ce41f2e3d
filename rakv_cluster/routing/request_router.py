"""The Serve router: candidates in, ranked candidates out. All policy is in :mod:`.policy`.

One lives in every process that calls the deployment by a handle. It needs real arguments, so it
works for calls by handle (as the ingress makes them), not for a deployment behind Serve's own
proxies. Only for ``ray[serve]`` 2.60, whose router interface is alpha.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.routing.policy import Decision, RoutePolicy, RouteRequest, RouteSettings
from rakv_cluster.routing.report import ReplicaReport, decode_report
from rakv_cluster.routing.score import ChoiceSettings
from rakv_cluster.routing.ticket import Fallback, RouteTicket, route_request

log = logging.getLogger("ray.serve")

_LATE_S = 0.02
_LATE_IN_A_ROW = 3
_REST_S = 1.0
_MAX_REMEMBERED = 16384


@dataclass(frozen=True, slots=True)
class _Booked:
    """A request on its way to a replica."""

    request: RouteRequest
    decision: Decision
    replica: str


class ScoreGuard:
    """Whether the score may be used: after a failure, or when it was late several times in a
    row, requests are routed without it for a while."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late = 0
        self._rest_until_s = clock.monotonic_s()
        self._why = Fallback.FAILED

    def resting(self) -> list[Fallback]:
        """The reason not to use the score now, if there is one."""
        return [self._why] if self._clock.monotonic_s() < self._rest_until_s else []

    def took(self, seconds: float) -> None:
        """A decision took so long."""
        self._late = self._late + 1 if seconds > _LATE_S else 0
        if self._late >= _LATE_IN_A_ROW:
            self._rest(Fallback.LATE)

    def failed(self) -> None:
        """A decision failed."""
        self._rest(Fallback.FAILED)

    def _rest(self, why: Fallback) -> None:
        self._late = 0
        self._why = why
        self._rest_until_s = self._clock.monotonic_s() + _REST_S


class ExpectedTimeRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Sends each request where it should finish first.

    FIFOMixin, because calls fanned out inside one request share Serve's request id, by which the
    base class would match them. What was chosen for a request that has left meanwhile goes to the
    one that waits longest; what was booked moves with ``on_request_routed``.
    """

    def initialize_state(self, *, exploration: float = 0.01) -> None:
        """Serve calls this with the deployment's ``request_router_kwargs``."""
        settings = RouteSettings(choice=ChoiceSettings(exploration=exploration))
        self._clock = SystemClock()
        self._rng = np.random.default_rng()
        self._policy = RoutePolicy(settings, self._clock, self._rng)
        self._guard = ScoreGuard(self._clock)
        self._heard: dict[str, ReplicaReport] = {}
        self._booked: OrderedDict[str, _Booked] = OrderedDict()
        self._running: OrderedDict[str, str] = OrderedDict()
        # Requests whose call is over, by the thread that made it.
        self._over: deque[str] = deque()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's word on which replicas there are, with their latest reports."""
        super().update_replicas(replicas)
        self._hear(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of candidates, best first; two at random where the score cannot be used."""
        if not candidate_replicas:
            return []
        if pending_request is None:
            return self._two_at_random(candidate_replicas)
        # Without this Serve would try again and again without a pause.
        pending_request.routing_context.should_backoff = True
        args = pending_request.args
        if not args or not isinstance(args[0], EngineRequest):
            return self._two_at_random(candidate_replicas)
        ticket = _ticket(args)
        allowed = [
            each for each in candidate_replicas if _name(each.replica_id) not in ticket.avoid
        ]
        allowed = allowed or candidate_replicas
        if not ticket.trial and (why := self._guard.resting()):
            ticket.fell_back(*why)
            return self._two_at_random(allowed)
        try:
            return self._ranked(args[0], ticket, candidate_replicas)
        except Exception:  # whatever is wrong with the score, the request is routed
            log.exception("scoring failed; requests are routed without it for %.0f s", _REST_S)
            self._guard.failed()
            ticket.fell_back(Fallback.FAILED)
            return self._two_at_random(allowed)

    def _get_pending_request_matching_metadata(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        """Whose replica was found: the request it was chosen for, not the one that waits longest.

        FIFOMixin's hook. While a replica is asked how full it is (Serve asks one that had no
        request for 10 s), others are routed, and would hand theirs to the request that waits.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """The replica accepted: book the request where it really went."""
        args = pending_request.args
        if not args or not isinstance(args[0], EngineRequest):
            return
        request_id, name = args[0].request_id, _name(replica_id)
        _ticket(args).replica = name
        booked = self._booked.pop(request_id, None)
        if booked is None:
            return
        if booked.replica != name:
            self._policy.book(booked.request, booked.decision, name)
        self._running[request_id] = name
        _bound(self._running)

    def _settle(self) -> None:
        """Forget requests whose calls are over, also those that no replica ever took.

        Serve's own word on that (``on_request_completed``) names no request, may come before the
        replica's acceptance does, and does not come for a client that left while it waited.
        """
        while self._over:
            request_id = self._over.popleft()
            name = self._running.pop(request_id, "")
            if booked := self._booked.pop(request_id, None):
                name = booked.replica
            if name:
                self._policy.complete(request_id, name)

    def _hear(self, replicas: Sequence[RunningReplica]) -> None:
        self._settle()
        now_s = self._clock.monotonic_s()
        nodes = {_name(each.replica_id): each.node_id or "" for each in replicas}
        self._policy.view.set_replicas(nodes, now_s)
        self._heard = {name: said for name, said in self._heard.items() if name in nodes}
        for replica in replicas:
            name, report = _name(replica.replica_id), decode_report(replica.routing_stats)
            # The whole list comes whenever one replica has news: a repetition is no report.
            if report != self._heard.get(name, ReplicaReport()):
                self._heard[name] = report
                self._policy.hear(name, report)

    def _ranked(
        self, request: EngineRequest, ticket: RouteTicket, candidates: Sequence[RunningReplica]
    ) -> list[list[RunningReplica]]:
        started_s = self._clock.monotonic_s()
        self._settle()
        by_name = {_name(each.replica_id): each for each in candidates}
        asked = route_request(request, ticket)
        decision = self._policy.decide(
            asked, by_name.keys() - ticket.avoid or by_name, exploring=not ticket.trial
        )
        ticket.scored(decision)
        if not ticket.trial and not request.background:
            best = decision.order[0]
            self._policy.book(asked, decision, best)
            if request.request_id not in self._booked:
                ticket.on_close(partial(self._over.append, request.request_id))
            self._booked[request.request_id] = _Booked(asked, decision, best)
            _bound(self._booked)
            self._guard.took(self._clock.monotonic_s() - started_s)
        ranked = [by_name[name] for name in decision.order]
        rest = [each for name, each in by_name.items() if name not in decision.order]
        return [*([each] for each in ranked), *([rest] if rest else [])]

    def _two_at_random(self, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
        """Of one group, Serve takes the replica with the shorter queue: power of two choices."""
        count = min(2, len(candidates))
        picks = self._rng.choice(len(candidates), count, replace=False)
        return [[candidates[int(index)] for index in picks]]


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _ticket(args: Sequence[Any]) -> RouteTicket:
    """The call's ticket; one that nobody looks at where it has none."""
    return args[1] if len(args) > 1 and isinstance(args[1], RouteTicket) else RouteTicket()


def _bound(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > _MAX_REMEMBERED:
        remembered.popitem(last=False)
