"""The engine without its thread: everything one step does.

A step: end what is overdue, advance loads, admit, make room, compute one packed forward, choose
tokens, emit, store. All methods belong to one thread; :mod:`rakv_cluster.engine.engine` is the
shell that other threads talk to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.clock import Clock
from rakv_cluster.engine.admission import check_request
from rakv_cluster.engine.advancing import Advancer
from rakv_cluster.engine.checks import check_state
from rakv_cluster.engine.drafting import DraftedStep, Drafting
from rakv_cluster.engine.emission import Emitter
from rakv_cluster.engine.keeping import Keeper
from rakv_cluster.engine.packing import Part
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.engine.scheduler import (
    Share,
    StepLimits,
    TenantShares,
    choose_victim,
    next_admission,
    plan_step,
    take_seats,
)
from rakv_cluster.engine.sequence import Phase, Sequence, Sink
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.engine.stats import Counters, EngineStats
from rakv_cluster.engine.stepper import Stepper
from rakv_cluster.engine.wiring import Reuse
from rakv_cluster.kv.buffer import BufferPool
from rakv_cluster.model.step import Runner
from rakv_cluster.reuse.blender import NO_BLENDING, BlendSupport
from rakv_cluster.reuse.costs import Costs, CostView
from rakv_cluster.reuse.workers import Workers
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import NO_FLIGHT, SingleFlight
from rakv_cluster.types import FinishReason, Tier

_LOAD_GRACE_S = 0.002


class EngineCore:
    """State and behaviour of one replica's engine."""

    def __init__(
        self,
        runner: Runner,
        store: ChunkStore,
        speculator: Speculator,
        *,
        cuts: CutTable,
        limits: ChunkLimits,
        settings: EngineSettings,
        clock: Clock,
        numeric_class: str,
        near_tie_eps: float = 0.0,
        flight: SingleFlight = NO_FLIGHT,
        blending: BlendSupport = NO_BLENDING,
        loaders: Workers,
        savers: Workers,
        wake: Callable[[], None] = lambda: None,
        wait: Callable[[float], object] = lambda _: None,
        closed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._closed = closed
        self._wait = wait
        self._pool = BufferPool(
            runner.layout,
            budget_bytes=settings.kv_budget_bytes,
            device=runner.device,
            granule_tokens=settings.kv_granule_tokens,
        )
        self._costs = Costs(step_tokens=settings.max_step_tokens)
        self._counters = Counters()
        reuse = Reuse(
            store, flight, blending, runner, self._pool, self._costs, settings, clock, numeric_class
        )
        self._saver = reuse.saver(savers)
        self._keeper = Keeper(self._saver, cuts, limits)
        self._prefixes = reuse.prefixes(self._saver, self._keeper, loaders, self._counters, wake)
        self._emitter = Emitter(clock, self._counters)
        self._stepper = Stepper(
            runner,
            self._costs,
            clock,
            max_step_tokens=settings.max_step_tokens,
            eps=near_tie_eps,
        )
        self._limits = StepLimits(
            settings.max_step_tokens,
            settings.min_prefill_tokens,
            settings.decode_gap_factor,
            settings.background_step_tokens,
        )
        self._tenants = TenantShares()
        self._drafting = Drafting(speculator, max_step_tokens=settings.max_step_tokens)
        self._advancer = Advancer(
            self._stepper,
            self._drafting,
            self._emitter,
            counters=self._counters,
            tenants=self._tenants,
            clock=clock,
        )
        self._waiting: list[Sequence] = []
        self._active: dict[int, Sequence] = {}
        self._open: dict[str, Sequence] = {}
        self._arrivals = 0
        self._failed_steps = 0
        self._lone_turn = False

    @property
    def healthy(self) -> bool:
        """False once several steps in a row had no successful forward."""
        return self._failed_steps < self._settings.failure_limit

    @property
    def open_requests(self) -> int:
        """Requests that have not ended; any thread may ask."""
        return len(self._open)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that are not admitted yet; any thread may ask."""
        return sum(sequence.prompt_tokens for sequence in tuple(self._waiting))

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens of all open requests whose KV is not there yet, but of those in the
        background; any thread may ask."""
        urgent = [each for each in tuple(self._open.values()) if not each.request.background]
        return sum(max(each.prompt_tokens - each.length, 0) for each in urgent)

    @property
    def costs(self) -> CostView:
        """What work costs, as of now; any thread may ask."""
        return self._costs.view(self._clock.monotonic_s())

    def prepare(self, request: EngineRequest, sink: Sink) -> Sequence:
        """Check a request and build its state; any thread may call it.

        Raises ``InvalidRequest`` or ``ContextLengthExceeded`` for one that can never run.
        """
        check_request(request, self._runner, self._pool)
        now_s = self._clock.monotonic_s()
        return Sequence.create(request, sink, now_s, self._runner, self._settings.background_s)

    def calibrate(self) -> None:
        """Measure a few forwards, so that costs are known from the start."""
        self._stepper.calibrate(self._pool)

    def add(self, sequence: Sequence) -> None:
        """Take a prepared request into the waiting queue."""
        request = sequence.request
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._counters.requests += 1
        self._tenants.enter(request.tenant)
        self._open[request.request_id] = sequence
        self._waiting.append(sequence)
        if sequence.output_tokens >= request.max_tokens:
            self._emitter.emit(sequence, finish=FinishReason.LENGTH)
            self._close(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request and free what it holds; an unknown id is ignored (it may have ended)."""
        self._end(request_id, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """End every open request."""
        for request_id in list(self._open):
            self._end(request_id, FinishReason.CANCELLED)

    def fail_all(self, error: str) -> None:
        """End every open request with an error."""
        for request_id in list(self._open):
            self._end(request_id, FinishReason.ERROR, error)

    def step(self) -> bool:
        """Do one step; False if there was nothing to do until :meth:`next_deadline_s`."""
        now_s = self._clock.monotonic_s()
        for sequence in list(self._open.values()):
            if sequence.deadline_s <= now_s:
                self._end(sequence.request.request_id, FinishReason.DEADLINE)
        advanced = self._poll()
        if self._admit():
            advanced = True
            if any(each.phase is Phase.LOADING for each in self._active.values()):
                # A search that finds nothing, or little, is over soon and joins this very step.
                self._wait(_LOAD_GRACE_S)
                self._poll()
        self._grow()
        shares = self._plan()
        if shares:
            parts = [Part(self._active[share.arrival], share.tokens) for share in shares]
            self._run(self._drafting.draft(parts))
            self._keep_one()
        return bool(shares) or advanced

    def next_deadline_s(self) -> float:
        """When the next step is due if nobody calls before, on the engine's clock."""
        times = [sequence.deadline_s for sequence in self._open.values()]
        times += [self._prefixes.next_deadline_s(each) for each in self._active.values()]
        return min(times, default=float("inf"))

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state between two steps is not as it must be."""
        check_state(self._waiting, self._active, self._open, self._pool)

    def settle(self, keys: Collection[bytes]) -> None:
        """Wait for writes of ``keys`` (see :meth:`Saver.settle`); any thread but the engine's."""
        self._saver.settle(keys)

    def stats(self) -> EngineStats:
        """Sizes and totals. Reads only counters and lengths, so any thread may call it."""
        costs = self.costs
        return EngineStats(
            running=len(self._active),
            waiting=len(self._waiting),
            kv_leased_bytes=self._pool.leased_bytes,
            kv_budget_bytes=self._pool.budget_bytes,
            prefill_ms_per_token=costs.prefill_rate_ms(self._settings.max_step_tokens, 0),
            decode_ms_per_token=costs.decode_ms(1),
            ram_load_ms_per_mb=costs.load_ms_per_mb[Tier.RAM],
            disk_load_ms_per_mb=costs.load_ms_per_mb[Tier.DISK],
            saved_records=self._saver.saved,
            dropped_records=self._saver.dropped,
            counters=replace(self._counters, finished=dict(self._counters.finished)),
        )

    # --- admission and memory

    def _poll(self) -> bool:
        """Advance loads and joins; whether any was. Who has no memory to go on waits for it."""
        polled = self._prefixes.poll(self._active.values())
        for sequence in polled.displaced:
            self._put_back(sequence, kept_tokens=0)
        return polled.advanced

    def _admit(self) -> bool:
        admitted, now_s = False, self._clock.monotonic_s()
        while self._waiting and self._seats_taken() < self._settings.max_running:
            waiters = [each.waiter(now_s) for each in self._waiting]
            index = next_admission(waiters, self._tenants.served)
            sequence = self._waiting[index]
            try:
                buffer = self._pool.lease(self._lease_tokens(sequence))
            except MemoryError:
                yielding = self._yielding(now_s)
                if yielding and not waiters[index].background:
                    self._preempt(self._active[max(yielding)])
                    continue
                if self._active:
                    break
                # Nobody has any to give back: the device has less than the budget allows.
                self._end(sequence.request.request_id, FinishReason.NO_MEMORY)
                continue
            del self._waiting[index]
            sequence.buffer = buffer
            if sequence.admitted_s < 0:
                sequence.admitted_s = self._clock.monotonic_s()
            self._active[sequence.arrival] = sequence
            self._prefixes.begin(sequence)
            admitted = True
        return admitted

    def _seats_taken(self) -> int:
        """Active requests but those that wait for another replica or give way to all others."""
        now_s, active = self._clock.monotonic_s(), self._active.values()
        return sum(not (each.awaits_other_replica or each.gives_way(now_s)) for each in active)

    def _lease_tokens(self, sequence: Sequence) -> int:
        """Known tokens and some room: output is usually far shorter than its limit."""
        return min(sequence.lease_limit, sequence.count + self._settings.growth_tokens)

    def _grow(self) -> None:
        """Give every running sequence a slot for its next token, oldest first."""
        for sequence in sorted(self._active.values(), key=lambda each: each.arrival):
            while (
                sequence.phase is Phase.RUNNING
                and sequence.buffer is not None
                and sequence.count > sequence.buffer.capacity
            ):
                try:
                    self._move(sequence, self._lease_tokens(sequence))
                except MemoryError:
                    self._make_room(sequence)

    def _move(self, sequence: Sequence, tokens: int) -> None:
        """Into a larger buffer; raises ``MemoryError``, with nothing changed, if there is none."""
        old = sequence.buffer
        if old is None:
            raise AssertionError("a running sequence has a buffer")
        new = self._pool.lease(tokens)
        new.slots(0, old.length).copy_(old.slots(0, old.length))
        new.length = old.length
        sequence.buffer = new
        self._pool.release(old)
        self._counters.growths += 1

    def _make_room(self, needy: Sequence) -> None:
        """Preempt a sequence, that ``needy`` may grow."""
        movable = [each.arrival for each in self._active.values() if each.movable]
        yielding = self._yielding(self._clock.monotonic_s())
        self._preempt(self._active[choose_victim(movable, needy.arrival, yielding)])

    def _yielding(self, now_s: float) -> list[int]:
        """Numbers of active ones in the background whose memory others may have."""
        active = self._active.items()
        return [arrival for arrival, each in active if each.movable and each.gives_way(now_s)]

    def _preempt(self, victim: Sequence) -> None:
        """Its KV is computed (or found in the store) again later."""
        self._keeper.keep_rest(victim, self._costs.view(self._clock.monotonic_s()))
        self._put_back(victim, kept_tokens=victim.length)

    def _put_back(self, sequence: Sequence, *, kept_tokens: int) -> None:
        """Free what an active sequence holds; it is the next to be admitted again."""
        self._prefixes.give_up_claims(sequence, kept_tokens=kept_tokens)
        self._leave(sequence)
        sequence.phase = Phase.WAITING
        sequence.preempted = True
        self._waiting.append(sequence)
        self._counters.preemptions += 1

    def _leave(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        del self._active[sequence.arrival]
        self._prefixes.leave(sequence, self._active.values(), poisoned=poisoned)

    # --- computing

    def _plan(self) -> tuple[Share, ...]:
        now_s = self._clock.monotonic_s()
        candidates = [
            each.candidate(now_s) for each in self._active.values() if each.phase is Phase.RUNNING
        ]
        if not candidates:
            return ()
        costs = self._costs.view(now_s)
        seated = take_seats(candidates, self._settings.max_running)
        self._lone_turn = not self._lone_turn
        return plan_step(
            seated, self._tenants.served, self._limits, costs, lone_turn=self._lone_turn
        )

    def _run(self, step: DraftedStep) -> None:
        outcome = self._advancer.run(step)
        self._failed_steps = 0 if outcome.healthy else self._failed_steps + 1
        for sequence, error in outcome.failed:
            self._end(sequence.request.request_id, FinishReason.ERROR, error)
        for sequence in outcome.ended:
            self._close(sequence)

    def _keep_one(self) -> None:
        """Copy at most one finished chunk of one stream towards the store."""
        costs = self._costs.view(self._clock.monotonic_s())
        for sequence in self._active.values():
            if sequence.first_token_s >= 0 and self._keeper.keep_one(sequence, costs):
                return

    # --- ending

    def _end(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        sequence = self._open.get(request_id)
        if sequence is not None:
            self._emitter.emit(sequence, finish=reason, error=error)
            self._close(sequence, failed=reason is FinishReason.ERROR)

    def _close(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Free everything a request holds, after storing what is verified unless it failed."""
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
            self._prefixes.give_up_claims(sequence, kept_tokens=0)
        else:
            kept = not failed and sequence.phase is Phase.RUNNING
            if kept:
                self._keeper.keep_rest(sequence, self._costs.view(self._clock.monotonic_s()))
            self._prefixes.give_up_claims(
                sequence, kept_tokens=sequence.exact_length if kept else 0
            )
            self._leave(sequence, poisoned=failed)
        sequence.phase = Phase.DONE
        self._drafting.finish(sequence)
        self._tenants.leave(sequence.request.tenant)
        del self._open[sequence.request.request_id]
        self._closed(sequence.request.request_id)
        self._counters.ram_tokens += sequence.reused.get(Tier.RAM, 0)
        self._counters.disk_tokens += sequence.disk_tokens
        self._counters.blended_tokens += sequence.blended.kept
