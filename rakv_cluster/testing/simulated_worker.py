"""A replica and its node's disk in virtual time, for :mod:`.simulated_cluster`.

The model: prefills one after another in order of arrival; requests past their first token decode
side by side, each slowed by those that decode when it starts, none by prefills. What is stored and
evicted is decided by the store's own catalog and policy, what speculation brings by the measured
kind of table that the controller uses. Times in ms.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from rakv_cluster.routing.hot_set import CAPACITY, encode_hot_set
from rakv_cluster.routing.policy import RouteRequest
from rakv_cluster.routing.report import MAX_PACES, ReplicaReport
from rakv_cluster.routing.score import Reach
from rakv_cluster.speculation.arms import ARMS
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.testing.simulated_store import KvTier, SimulatedNode

_RATE_GAIN = 0.5
_HOLD_GAIN = 0.1
_PRIOR_ACCEPTANCE = 0.5
_STEPS = StepCosts((1, 2, 4, 8, 16), (20.0, 20.5, 22.0, 26.0, 36.0))


@dataclass(frozen=True, slots=True)
class Hardware:
    """The truth about a replica; rates as in :class:`~rakv_cluster.routing.score.Fleet`.

    ``steps`` is a decode step's cost by rows, ``acceptance`` the chance of each draft by kind of
    work; empty: nothing is drafted. ``ram_tokens`` and ``disk_tokens`` bound what is kept.
    """

    prefill_ms: float = 0.1
    prefill_slope_ms: float = 2e-6
    ram_ms: float = 0.001
    disk_ms: float = 0.05
    remote_ms: float = 0.06
    chunk_ms: float = 0.3
    steps: StepCosts = _STEPS
    step_slope_ms: float = 0.2
    slots: int = 64
    ram_tokens: int = 400_000
    disk_tokens: int = 4_000_000
    acceptance: Mapping[str, float] = field(default_factory=dict)

    def pace_ms(self, kind: str) -> float:
        """Ms per emitted token of one request alone, at the best number of drafts.

        Of a kind that was never seen, what a prior promises.
        """
        chance = self.acceptance.get(kind, _PRIOR_ACCEPTANCE) if self.acceptance else 0.0
        return min(
            self.steps.at(1 + drafts) / sum(chance**depth for depth in range(drafts + 1))
            for drafts in ARMS
            if 1 + drafts <= self.steps.rows[-1]
        )


@dataclass(slots=True)
class Job:
    """One attempt of a request on a worker. ``estimate_ms`` is what it was queued as."""

    request: RouteRequest
    output_tokens: int
    estimate_ms: float = 0.0
    reused_tokens: int = 0


JobEvent: TypeAlias = Callable[["Job", float], None]
"""Something happened to a job, at so many ms."""

Schedule: TypeAlias = Callable[[float, Callable[[], None]], None]
"""Do this after so many ms."""


class SimulatedWorker:
    """One replica. ``elsewhere`` tells whether another node's disk holds a key.

    ``on_first`` and ``on_done`` are called at a job's first and last token.
    """

    def __init__(
        self,
        *,
        name: str,
        node: SimulatedNode,
        hardware: Hardware,
        elsewhere: Callable[[bytes], bool],
        schedule: Schedule,
        on_first: JobEvent,
        on_done: JobEvent,
    ) -> None:
        self.name = name
        self.node = node
        self.hardware = hardware
        self.alive = True
        self.jobs: dict[str, Job] = {}
        self.busy_ms = 0.0
        self._ram = KvTier(hardware.ram_tokens)
        self._elsewhere = elsewhere
        self._schedule = schedule
        self._on_first = on_first
        self._on_done = on_done
        self._queue: deque[Job] = deque()
        self._queued_ms = 0.0
        self._prefill_ends_ms = 0.0
        self._prefilling = False
        self._decoding = 0
        self._disk_ms = hardware.disk_ms
        self._pace = functools.cache(hardware.pace_ms)
        self._seen: dict[str, float] = {}
        self._hold_ms = 0.0
        self._hot = b""
        self._ram_changed = True

    @property
    def open_requests(self) -> int:
        """Requests queued or running."""
        return len(self.jobs)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute for the requests that wait, as estimated when they came."""
        return sum(job.request.prompt_tokens - job.reused_tokens for job in self._queue)

    @property
    def open_tokens(self) -> int:
        """Prompt tokens of all open requests."""
        return sum(job.request.prompt_tokens for job in self.jobs.values())

    @property
    def _may_start(self) -> bool:
        return not self._prefilling and self._decoding < self.hardware.slots

    def submit(self, job: Job, now_ms: float) -> None:
        """Queue a request."""
        self.jobs[job.request.request_id] = job
        if not self._may_start or self._queue:  # else it is planned at once, to start
            _, job.estimate_ms, job.reused_tokens = self._plan(job.request)
        self._queued_ms += job.estimate_ms
        self._queue.append(job)
        self._advance(now_ms)

    def kill(self) -> list[Job]:
        """Lose everything; returns what was in hand."""
        self.alive = False
        lost = list(self.jobs.values())
        self.jobs.clear()
        self._queue.clear()
        return lost

    def report(self, now_ms: float) -> ReplicaReport:
        """What it says about itself."""
        hw = self.hardware
        return ReplicaReport(
            backlog_ms=max(self._prefill_ends_ms - now_ms, 0.0) + self._queued_ms,
            open_requests=float(len(self.jobs)),
            slots=float(hw.slots),
            prefill_ms=hw.prefill_ms,
            prefill_slope_ms=hw.prefill_slope_ms,
            ram_ms=hw.ram_ms,
            disk_ms=self._disk_ms,
            remote_ms=hw.remote_ms,
            chunk_ms=hw.chunk_ms,
            token_ms=self._pace(""),
            token_ms_slope=hw.step_slope_ms,
            hold_ms=self._hold_ms,
            pace=dict(list(self._seen.items())[:MAX_PACES]),
            hot=self._hot_set(),
        )

    def _hot_set(self) -> bytes:
        if self._ram_changed:
            self._hot = encode_hot_set(self._ram.newest(CAPACITY))
            self._ram_changed = False
        return self._hot

    def _advance(self, now_ms: float) -> None:
        """Start the next prefill if it can start now."""
        if not self._queue or not self._may_start:
            return
        job = self._queue.popleft()
        self._queued_ms = max(self._queued_ms - job.estimate_ms, 0.0)
        reaches, work_ms, job.reused_tokens = self._plan(job.request)
        self._learn_disk(reaches)
        self._prefilling = True
        self._prefill_ends_ms = now_ms + work_ms
        self.busy_ms += work_ms
        self._ram.touch(job.request.keys, now_ms)
        self._ram_changed = True
        self.node.disk.touch(job.request.keys, now_ms)
        self._schedule(work_ms, partial(self._prefilled, job, now_ms + work_ms))

    def _prefilled(self, job: Job, now_ms: float) -> None:
        if not self.alive:
            return
        self._prefilling = False
        self._decoding += 1
        ends = job.request.chunk_ends.tolist()
        chunks = {
            key: (start, end - start)
            for key, start, end in zip(job.request.keys, [0, *ends[:-1]], ends, strict=True)
        }
        self._ram.add(chunks, now_ms)
        self._ram_changed = True
        self.node.keep(chunks, now_ms)
        self._on_first(job, now_ms)
        hw = self.hardware
        slowed = 1 + hw.step_slope_ms * (self._decoding - 1) / hw.steps.at(1)
        decode_ms = job.output_tokens * self._pace(job.request.kind) * slowed
        self._hold_ms += _HOLD_GAIN * (decode_ms - self._hold_ms)
        self._schedule(decode_ms, partial(self._finished, job, now_ms + decode_ms))
        self._advance(now_ms)

    def _finished(self, job: Job, now_ms: float) -> None:
        if not self.alive:
            return
        self._decoding -= 1
        del self.jobs[job.request.request_id]
        kind = job.request.kind
        self._seen[kind] = self._pace(kind)
        self._on_done(job, now_ms)
        self._advance(now_ms)

    def _plan(self, request: RouteRequest) -> tuple[list[Reach], float, int]:
        """Where the leading chunks come from, ms to the first token, tokens reused.

        Decided by what this worker believes of its disk, and taking what the disk really takes.
        """
        hw = self.hardware
        rates = {Reach.RAM: hw.ram_ms, Reach.DISK: self._disk_ms, Reach.REMOTE: hw.remote_ms}
        late_ms = hw.disk_ms * self.node.slowdown - self._disk_ms
        total = request.prompt_tokens
        best_ms, best_cut, lateness_ms, reused = self._prefill(0, total), 0, 0.0, 0
        reaches: list[Reach] = []
        spent_ms = spent_late_ms = 0.0
        start = 0
        for key, chunk_end in zip(request.keys, request.chunk_ends.tolist(), strict=True):
            reach = self._reach(key)
            if reach is Reach.NONE:
                break
            end = min(chunk_end, total - 1)
            spent_ms += hw.chunk_ms + (end - start) * rates[reach]
            spent_late_ms += (end - start) * late_ms if reach is Reach.DISK else 0.0
            reaches.append(reach)
            start = end
            if (ms := spent_ms + self._prefill(end, total)) < best_ms:
                best_ms, best_cut, lateness_ms, reused = ms, len(reaches), spent_late_ms, end
        return reaches[:best_cut], best_ms + lateness_ms, reused

    def _reach(self, key: bytes) -> Reach:
        if key in self._ram:
            return Reach.RAM
        if key in self.node.disk:
            return Reach.DISK
        return Reach.REMOTE if self._elsewhere(key) else Reach.NONE

    def _prefill(self, start: int, stop: int) -> float:
        hw = self.hardware
        return hw.prefill_ms * (stop - start) + hw.prefill_slope_ms * (stop**2 - start**2) / 2

    def _learn_disk(self, reaches: Sequence[Reach]) -> None:
        if Reach.DISK in reaches:
            seen = self.hardware.disk_ms * self.node.slowdown
            self._disk_ms += _RATE_GAIN * (seen - self._disk_ms)
