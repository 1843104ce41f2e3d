"""One router's decisions: score, choose, and remember what was chosen. No Ray in here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from rakv_cluster.clock import Clock
from rakv_cluster.routing.demand import Demand
from rakv_cluster.routing.locations import Holders
from rakv_cluster.routing.replica_view import ReplicaView, ViewSettings
from rakv_cluster.routing.report import ReplicaReport
from rakv_cluster.routing.score import (
    ChoiceSettings,
    Ints,
    Reason,
    Scores,
    Work,
    choose,
    crowding,
    depth,
    score,
)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a router needs to know of a request.

    ``keys`` name its leading chunks, which end at ``chunk_ends``; ``holders`` are the nodes that
    hold them, as far as the directory knows. ``kind`` is the sort of work, by which replicas
    report their pace.
    """

    request_id: str
    keys: tuple[bytes, ...]
    chunk_ends: Ints
    prompt_tokens: int
    output_tokens: float
    kind: str = ""
    holders: Holders = ()


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """All bounds of a router. Only the first ``max_chunks`` chunks of a prompt are looked at."""

    max_chunks: int = 256
    choice: ChoiceSettings = field(default_factory=ChoiceSettings)
    view: ViewSettings = field(default_factory=ViewSettings)


@dataclass(frozen=True, slots=True)
class Decision:
    """Replica ids, the chosen one first, and why; ``scores`` are by index in ``ids``."""

    order: tuple[str, ...]
    reason: Reason
    ids: tuple[str, ...]
    scores: Scores


@dataclass(frozen=True, slots=True)
class ReplicaTerms:
    """One replica's line of an explanation.

    ``expected_ms`` is the sum of the terms up to ``decode_ms``: the request's own time.
    ``crowding_ms`` is the price of what its work costs others; the least sum of both is chosen.

    Before costs are known the terms are 0 and ``expected_ms`` is an order, not a time.
    """

    replica: str
    expected_ms: float
    backlog_ms: float
    slot_wait_ms: float
    load_ms: float
    prefill_ms: float
    decode_ms: float
    crowding_ms: float
    reused_tokens: int


class RoutePolicy:
    """Decides for one router and books what it decided. Used by one thread."""

    def __init__(self, settings: RouteSettings, clock: Clock, rng: np.random.Generator) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self.view = ReplicaView(settings.view, clock.monotonic_s())
        self.demand = Demand()

    @property
    def now_s(self) -> float:
        """The policy's time."""
        return self._clock.monotonic_s()

    def hear(self, replica: str, report: ReplicaReport) -> None:
        """A replica's report arrived."""
        age_s = self._clock.wall_s() - report.at_s
        self.view.report(replica, report, age_s, self.now_s)

    def decide(
        self, request: RouteRequest, candidates: Collection[str] = (), *, exploring: bool = True
    ) -> Decision:
        """Choose among ``candidates`` (all replicas if empty); changes nothing but the generator.

        Not ``exploring``, it tells what it would choose but for that.
        Raises ``LookupError`` if no candidate is a known replica, ``FloatingPointError`` if none
        has a finite expectation.
        """
        view, now_s = self.view, self.now_s
        indices = self._indices(candidates)
        chunks = self._settings.max_chunks
        keys, ends = request.keys[:chunks], request.chunk_ends[:chunks]
        work = Work(request.prompt_tokens, ends, request.output_tokens)
        fleet = view.fleet(request.kind, now_s)  # first: it forgets what is too old
        reach = view.locations.reach(keys, request.holders, now_s)
        reached = depth(reach)
        others = self.demand.of(keys[reached - 1]) if reached else 0
        scores = score(work, reach[:, :reached], fleet, crowding=crowding(fleet, others))
        settings = self._settings.choice
        if not exploring:
            settings = replace(settings, exploration=0.0)
        choice = choose(scores, indices, settings, self._rng)
        order = tuple(view.ids[index] for index in choice.order)
        return Decision(order, choice.reason, view.ids, scores)

    def book(self, request: RouteRequest, decision: Decision, replica: str) -> None:
        """The request goes to ``replica``: its load and the chunks it will hold count from now."""
        index = self.view.index.get(replica)
        if index is None or replica not in decision.ids:
            return
        now_s, scores = self.now_s, decision.scores
        scored = decision.ids.index(replica)
        work_ms = float(scores.load_ms[scored] + scores.prefill_ms[scored])
        wait_ms = float(scores.backlog_ms[scored] + scores.slot_wait_ms[scored])
        done_s = now_s + (wait_ms + work_ms) / 1e3
        self.view.loads.book(request.request_id, index, work_ms, now_s)
        keys = request.keys[: self._settings.max_chunks]
        self.demand.add(request.request_id, keys)
        self.view.locations.predict(keys, index, done_s)

    def complete(self, request_id: str, replica: str) -> None:
        """A request ended on a replica."""
        self.demand.remove(request_id)
        index = self.view.index.get(replica)
        if index is not None:
            self.view.loads.complete(request_id, index)

    def _indices(self, candidates: Collection[str]) -> Ints:
        known = self.view.index
        if not candidates:
            candidates = self.view.ids
        indices = [known[replica] for replica in candidates if replica in known]
        if not indices:
            raise LookupError("no candidate is a known replica")
        return np.asarray(indices, dtype=np.int64)


def explain(decision: Decision) -> list[ReplicaTerms]:
    """The terms of every replica, in the order of ``decision.ids``."""
    scores = decision.scores
    return [
        ReplicaTerms(
            replica=replica,
            expected_ms=float(scores.total_ms[index]),
            backlog_ms=float(scores.backlog_ms[index]),
            slot_wait_ms=float(scores.slot_wait_ms[index]),
            load_ms=float(scores.load_ms[index]),
            prefill_ms=float(scores.prefill_ms[index]),
            decode_ms=float(scores.decode_ms[index]),
            crowding_ms=float(scores.crowding_ms[index]),
            reused_tokens=int(scores.reused_tokens[index]),
        )
        for index, replica in enumerate(decision.ids)
    ]
