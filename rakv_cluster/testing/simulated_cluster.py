"""A whole service in virtual time: ingresses, routers, replicas, store and directory.

Seeded and deterministic. The router's view, score and booking, the store's catalog and eviction
and the directory's partitions, announcers and snapshots are the real ones; replicas are
:class:`~.simulated_worker.SimulatedWorker`. Faults: reports late or lost, slow disks, and replicas
that die, with what they had in hand sent again by their ingress.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from rakv_cluster.cluster.directory import DirectorySnapshot
from rakv_cluster.routing.locations import directory_holders
from rakv_cluster.routing.output_length import OutputLengths
from rakv_cluster.routing.policy import RoutePolicy, RouteRequest, RouteSettings
from rakv_cluster.routing.report import ReplicaReport, decode_report, encode_report
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.simulated_store import SimulatedStore
from rakv_cluster.testing.simulated_worker import Hardware, Job, SimulatedWorker
from rakv_cluster.testing.traces import TraceRequest


class Rule(Protocol):
    """How an ingress picks a replica. Books in ``policy`` what it wants to remember."""

    def __call__(
        self, request: RouteRequest, policy: RoutePolicy, workers: Sequence[SimulatedWorker]
    ) -> str:
        """The name of one of ``workers``, which live as far as the ingress knows."""
        ...


def ours(request: RouteRequest, policy: RoutePolicy, workers: Sequence[SimulatedWorker]) -> str:
    """The service's own router."""
    everyone = len(workers) == len(policy.view.ids)
    decision = policy.decide(request, () if everyone else [worker.name for worker in workers])
    policy.book(request, decision, decision.order[0])
    return decision.order[0]


@dataclass(frozen=True, slots=True)
class Death:
    """A replica dies at ``at_ms``, and with it its node if it is the last one there."""

    at_ms: float
    worker: int


@dataclass(frozen=True, slots=True)
class Birth:
    """A replica joins at ``at_ms``, with nothing in RAM; its node was there before."""

    at_ms: float
    worker: int


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """From ``at_ms`` on, a node's disk takes ``factor`` times as long."""

    at_ms: float
    node: int
    factor: float


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """``hardware`` is repeated until there are ``replicas``.

    Every ``report_period_s`` a replica with news reports; each ingress hears it after up to
    ``report_delay_s`` or, with chance ``report_loss``, never. A death or birth is known to the
    ingresses after ``detect_s``; until then a call to a dead replica fails after ``failure_ms``.
    ``speculation_reported`` false makes replicas report what a token costs without drafts.
    """

    replicas: int = 8
    replicas_per_node: int = 1
    ingresses: int = 1
    hardware: tuple[Hardware, ...] = (Hardware(),)
    report_period_s: float = 1.0
    report_delay_s: float = 1.1
    report_loss: float = 0.0
    directory_period_s: float = 1.0
    detect_s: float = 1.0
    failure_ms: float = 20.0
    speculation_reported: bool = True
    deaths: tuple[Death, ...] = ()
    births: tuple[Birth, ...] = ()
    slow_disks: tuple[SlowDisk, ...] = ()
    route: RouteSettings = field(default_factory=RouteSettings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; times from its arrival."""

    request_id: str
    worker: str
    arrived_ms: float
    ttft_ms: float
    e2e_ms: float
    prompt_tokens: int
    reused_tokens: int
    attempts: int
    kind: str


class Ingress:
    """A router with its own, stale, view."""

    def __init__(self, route: RouteSettings, clock: ManualClock, rng: np.random.Generator) -> None:
        self.policy = RoutePolicy(route, clock, rng)
        self.snapshot = DirectorySnapshot()
        self.lengths = OutputLengths()
        self.workers: tuple[SimulatedWorker, ...] = ()


@dataclass(slots=True)
class _Open:
    trace: TraceRequest
    ingress: Ingress
    arrived_ms: float
    attempts: int = 0
    ttft_ms: float = -1.0
    failed_on: frozenset[str] = frozenset()


class SimulatedCluster:
    """Serves one trace. Every request is routed by ``rule``, deaths are the only failures."""

    def __init__(self, settings: ClusterSettings, seed: int, rule: Rule = ours) -> None:
        self.settings = settings
        self.decisions = 0
        self._rule = rule
        self._rng = np.random.default_rng(seed)
        self._clock = ManualClock(0.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        # By session with an open request: what waits for its answer.
        self._sessions: dict[str, deque[tuple[str, TraceRequest]]] = {}
        self._told: dict[str, dict[str, object]] = {}
        self._outcomes: list[Outcome] = []
        per_node = settings.replicas_per_node
        hardware = settings.hardware
        nodes = -(-settings.replicas // per_node)
        disks = [hardware[n * per_node % len(hardware)].disk_tokens for n in range(nodes)]
        self.store = SimulatedStore(disks)
        self.workers = [self._worker(number) for number in range(settings.replicas)]
        for birth in settings.births:
            self.workers[birth.worker].alive = False
        self._by_name = {worker.name: worker for worker in self.workers}
        self.ingresses = [
            Ingress(settings.route, self._clock, np.random.default_rng((seed, number)))
            for number in range(settings.ingresses)
        ]
        self._next_ingress = itertools.cycle(self.ingresses)
        self._tell_members()
        self._schedule_background()

    @property
    def now_ms(self) -> float:
        """Virtual time."""
        return self._clock.monotonic_s() * 1e3

    def run(self, trace: Iterable[TraceRequest]) -> list[Outcome]:
        """Serve ``trace`` (ascending in time) to its last token; outcomes in order of completion.

        Requests go to the ingresses in turn. One whose session waits for an answer arrives with it.
        """
        for number, request in enumerate(trace):
            while self._events and self._events[0][0] < request.at_ms:
                self._step()
            self._pass_time(request.at_ms)
            request_id = f"q{number}"
            if request.session in self._sessions:
                self._sessions[request.session].append((request_id, request))
                continue
            if request.session:
                self._sessions[request.session] = deque()
            self._arrive(request_id, request)
        while self._open:
            self._step()
        return self._outcomes

    # Time.

    def _after(self, delay_ms: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ms + delay_ms, next(self._numbers), act))

    def _step(self) -> None:
        at_ms, _, act = heapq.heappop(self._events)
        self._pass_time(at_ms)
        act()

    def _pass_time(self, until_ms: float) -> None:
        self._clock.advance(max(until_ms - self.now_ms, 0.0) / 1e3)

    def _every(self, period_s: float, act: Callable[[], None], delay_s: float) -> None:
        def again() -> None:
            act()
            self._after(period_s * 1e3, again)

        self._after(delay_s * 1e3, again)

    def _schedule_background(self) -> None:
        settings = self.settings
        for worker in self.workers:
            phase_s = float(self._rng.random()) * settings.report_period_s
            self._every(settings.report_period_s, partial(self._report, worker), phase_s)
        self._every(settings.directory_period_s, self._exchange, settings.directory_period_s)
        for death in settings.deaths:
            self._after(death.at_ms, partial(self._die, self.workers[death.worker]))
        for birth in settings.births:
            self._after(birth.at_ms, partial(self._join, self.workers[birth.worker]))
        for slow in settings.slow_disks:
            self._after(slow.at_ms, partial(self.store.slow_down, slow.node, slow.factor))

    # Requests.

    def _arrive(self, request_id: str, trace: TraceRequest) -> None:
        self._open[request_id] = _Open(trace, next(self._next_ingress), self.now_ms)
        self._dispatch(request_id)

    def _dispatch(self, request_id: str) -> None:
        opened = self._open[request_id]
        opened.attempts += 1
        self.decisions += 1
        ingress, trace = opened.ingress, opened.trace
        located = ingress.snapshot.locate(trace.keys)
        request = RouteRequest(
            request_id=request_id,
            keys=trace.keys,
            chunk_ends=trace.chunk_ends,
            prompt_tokens=trace.prompt_tokens,
            output_tokens=ingress.lengths.expected(trace.kind, "", 1 << 20),
            kind=trace.kind,
            holders=directory_holders(trace.keys, located),
        )
        workers: Sequence[SimulatedWorker] = ingress.workers
        if opened.failed_on:
            others = [w for w in workers if w.name not in opened.failed_on]
            workers = others or workers
        name = self._rule(request, ingress.policy, workers)
        worker = self._by_name[name]
        if worker.alive:
            worker.submit(Job(request, trace.output_tokens), self.now_ms)
        else:
            self._retry(request_id, worker.name)

    def _retry(self, request_id: str, dead: str) -> None:
        opened = self._open[request_id]
        opened.failed_on |= {dead}
        opened.ingress.policy.complete(request_id, dead)
        self._after(self.settings.failure_ms, partial(self._dispatch, request_id))

    def _first_token(self, job: Job, now_ms: float) -> None:
        opened = self._open[job.request.request_id]
        # The client has had its first token, even if the replica dies later.
        if opened.ttft_ms < 0:
            opened.ttft_ms = now_ms - opened.arrived_ms

    def _finished(self, job: Job, worker: str, now_ms: float) -> None:
        request = job.request
        opened = self._open.pop(request.request_id)
        opened.ingress.policy.complete(request.request_id, worker)
        opened.ingress.lengths.observe(request.kind, "", job.output_tokens)
        self._outcomes.append(
            Outcome(
                request_id=request.request_id,
                worker=worker,
                arrived_ms=opened.arrived_ms,
                ttft_ms=opened.ttft_ms,
                e2e_ms=now_ms - opened.arrived_ms,
                prompt_tokens=request.prompt_tokens,
                reused_tokens=job.reused_tokens,
                attempts=opened.attempts,
                kind=request.kind,
            )
        )
        if waiting := self._sessions.get(opened.trace.session):
            self._arrive(*waiting.popleft())
        else:
            self._sessions.pop(opened.trace.session, None)

    # Replicas and what is told of them.

    def _worker(self, number: int) -> SimulatedWorker:
        settings, name = self.settings, f"w{number}"
        node = self.store.nodes[number // settings.replicas_per_node]
        return SimulatedWorker(
            name=name,
            node=node,
            hardware=settings.hardware[number % len(settings.hardware)],
            elsewhere=partial(self.store.elsewhere, node.name),
            schedule=self._after,
            on_first=self._first_token,
            on_done=lambda job, now_ms: self._finished(job, name, now_ms),
        )

    def _report(self, worker: SimulatedWorker) -> None:
        if not worker.alive:
            return
        report = worker.report(self.now_ms)
        if not self.settings.speculation_reported:
            report = replace(report, token_ms=worker.hardware.steps.at(1), pace={})
        stats = encode_report(report, self._clock.wall_s())
        if stats == self._told.get(worker.name):
            return
        self._told[worker.name] = stats
        for ingress in self.ingresses:
            if self._rng.random() >= self.settings.report_loss:
                delay_ms = float(self._rng.random()) * self.settings.report_delay_s * 1e3
                hear = partial(self._hear, ingress, worker.name, decode_report(stats))
                self._after(delay_ms, hear)

    def _hear(self, ingress: Ingress, worker: str, report: ReplicaReport) -> None:
        ingress.policy.hear(worker, report)

    def _exchange(self) -> None:
        self.store.exchange()
        for ingress in self.ingresses:
            self.store.update(ingress.snapshot)

    def _die(self, worker: SimulatedWorker) -> None:
        for job in worker.kill():
            self._retry(job.request.request_id, worker.name)
        if not any(other.alive and other.node is worker.node for other in self.workers):
            self.store.remove(worker.node.name)
        self._after(self.settings.detect_s * 1e3, self._tell_members)

    def _join(self, worker: SimulatedWorker) -> None:
        worker.alive = True
        self._after(self.settings.detect_s * 1e3, self._tell_members)

    def _tell_members(self) -> None:
        living = tuple(worker for worker in self.workers if worker.alive)
        nodes = {worker.name: worker.node.name for worker in living}
        for ingress in self.ingresses:
            ingress.workers = living
            ingress.policy.view.set_replicas(nodes, self._clock.monotonic_s())
            ingress.snapshot.set_nodes(self.store.live)
