"""One replica's engine: a thread around :class:`EngineCore`, and the door that others knock at."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.clock import Clock
from rakv_cluster.engine.core import EngineCore
from rakv_cluster.engine.idle import IdleRunner
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.engine.sequence import Sequence, Sink
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.engine.stats import EngineStats
from rakv_cluster.engine.text import NO_BYTES, TextStream, TokenBytes
from rakv_cluster.errors import InvalidRequest, Overloaded, Unavailable
from rakv_cluster.model.grammar import Grammars, no_grammars
from rakv_cluster.model.step import Runner
from rakv_cluster.model.threads import aside
from rakv_cluster.reuse.blender import NO_BLENDING, BlendSupport
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.workers import ThreadWorkers
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import NO_FLIGHT, SingleFlight

log = logging.getLogger(__name__)

_SAVER_QUEUE = 4096
_LONGEST_RETRY_S = 60.0
_LONGEST_IDLE_S = 60.0
_QUIET_S = 0.2
"""Without requests, before other work begins: the next one of a conversation may follow at once."""


class Engine:
    """Serves requests by packed steps in a thread of its own.

    ``submit`` and ``cancel`` may be called from any thread; sinks are called in the engine's
    thread and must return at once. A sink gets its request's events in order, the last one with
    ``finish`` set, whatever happens to the engine.
    """

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
        grammars: Grammars = no_grammars,
        token_bytes: TokenBytes = NO_BYTES,
    ) -> None:
        """``token_bytes`` is what stop strings are found by."""
        self._settings = settings
        self._grammars = grammars
        self._token_bytes = token_bytes
        self._clock = clock
        self._loaders = ThreadWorkers(
            "rakv-load",
            threads=settings.loader_threads,
            queue_limit=settings.max_running + settings.max_waiting,
        )
        self._savers = ThreadWorkers("rakv-save", threads=1, queue_limit=_SAVER_QUEUE)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._submitted: list[Sequence] = []
        self._cancelled: set[str] = set()
        self._open: set[str] = set()
        self._stopping = False
        self._broken = ""
        self._thread = threading.Thread(target=self._run, name="rakv-engine", daemon=True)
        self._idle = IdleRunner(runner, self._woken.set)
        self._busy_s = float("-inf")
        self._core = EngineCore(
            runner,
            store,
            speculator,
            cuts=cuts,
            limits=limits,
            settings=settings,
            clock=clock,
            numeric_class=numeric_class,
            near_tie_eps=near_tie_eps,
            flight=flight,
            blending=blending,
            loaders=self._loaders,
            savers=self._savers,
            wake=self._woken.set,
            wait=self._woken.wait,
            closed=self._closed,
        )

    def start(self, *, calibrate: bool = True) -> None:
        """Start serving, after measuring first costs (a second or so) unless told not to."""
        if calibrate:
            aside(self._core.calibrate)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel everything open, finish pending writes within ``timeout_s``, stop the thread."""
        with self._lock:
            self._stopping = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._loaders.close(timeout_s)
        self._savers.close(timeout_s)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request; its events go to ``sink``.

        Raises ``InvalidRequest`` or ``ContextLengthExceeded`` for one that can never run,
        ``Overloaded`` when the waiting queue is full, ``Unavailable`` when the engine is stopped
        or broken.
        """
        sequence = self._core.prepare(request, sink)
        if request.grammar:
            mask = self._grammars(request.grammar)
            for token_id in request.forced_ids:
                mask.accept(token_id)
            sequence.rule.restrict(mask)
        if request.stops:
            sequence.text = self._text(request)
        with self._lock:
            if self._stopping or self._broken:
                raise Unavailable(self._broken or "the engine is stopping", retry_after_s=1.0)
            if request.request_id in self._open:
                raise InvalidRequest(
                    f"request id {request.request_id} is in use", field="request_id"
                )
            if len(self._open) >= self._settings.max_waiting + self._settings.max_running:
                raise Overloaded(
                    f"{len(self._open)} requests are open already",
                    retry_after_s=self._retry_after_s(),
                )
            self._open.add(request.request_id)
            self._submitted.append(sequence)
        self._woken.set()

    def cancel(self, request_id: str) -> None:
        """End a request before its next step; nothing happens if it has ended already."""
        with self._lock:
            if request_id in self._open:
                self._cancelled.add(request_id)
        self._woken.set()

    def settle(self, keys: Collection[bytes]) -> None:
        """Wait, for a bounded time, until KV on its way to the store is there."""
        self._core.settle(keys)

    @property
    def idle_runner(self) -> Runner:
        """The model for other threads' work that nobody waits for: it is run when no request is
        open."""
        return self._idle

    def stats(self) -> EngineStats:
        """Sizes now and totals since start."""
        return self._core.stats()

    def costs(self) -> CostView:
        """What work costs here, as of now."""
        return self._core.costs

    def uncomputed_tokens(self) -> int:
        """Prompt tokens of all open requests whose KV is not there yet."""
        return self._core.uncomputed_tokens

    def healthy(self) -> bool:
        """Whether the thread runs and forwards succeed."""
        return self._thread.is_alive() and not self._broken and self._core.healthy

    def _text(self, request: EngineRequest) -> TextStream:
        """The request's text so far, in which its stop strings are sought."""
        text = TextStream(self._token_bytes, stops=request.stops, min_tokens=request.min_tokens)
        if text.push(request.forced_ids).stop:
            raise InvalidRequest("a stop string is in the forced tokens", field="forced_ids")
        return text

    def _retry_after_s(self) -> float:
        """About the time to compute the prompts that wait to be taken in."""
        tokens = self._core.waiting_tokens
        ms = tokens * self._core.stats().prefill_ms_per_token
        return min(max(ms / 1e3, 1.0), _LONGEST_RETRY_S)

    def _use_idle_time(self) -> bool:
        """Do a piece of what nobody waits for; False if there is none, or it is not its time."""
        return self._quiet_in_s() <= 0 and self._idle.run_one()

    def _quiet_in_s(self) -> float:
        """Until no request will have been open for a moment."""
        return self._busy_s + _QUIET_S - self._clock.monotonic_s()

    def _idle_s(self) -> float:
        until_s = self._core.next_deadline_s() - self._clock.monotonic_s()
        if self._idle.waits:
            until_s = min(until_s, self._quiet_in_s())
        return min(max(until_s, 0.0), _LONGEST_IDLE_S)

    def _closed(self, request_id: str) -> None:
        with self._lock:
            self._open.discard(request_id)
            self._cancelled.discard(request_id)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._woken.clear()
                self._take_commands()
                worked = self._core.step()
                if self._core.open_requests:
                    self._busy_s = self._clock.monotonic_s()
                if not worked and not self._use_idle_time():
                    self._woken.wait(self._idle_s())
            self._take_commands()
            self._core.cancel_all()
        except Exception as error:
            log.exception("the engine's loop broke; all its requests end")
            self._broken = f"the engine failed ({type(error).__name__})"
            self._take_commands()
            self._core.fail_all(self._broken)
        finally:
            self._idle.close()

    def _take_commands(self) -> None:
        with self._lock:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, set()
        for sequence in submitted:
            self._core.add(sequence)
        for request_id in cancelled:
            self._core.cancel(request_id)
