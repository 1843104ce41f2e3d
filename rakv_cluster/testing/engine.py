"""An engine core driven step by step, with its invariants checked after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.engine.core import EngineCore
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.engine.text import NO_BYTES, TokenBytes
from rakv_cluster.errors import InvalidRequest
from rakv_cluster.model.step import Runner
from rakv_cluster.reuse.blender import NO_BLENDING, BlendSupport
from rakv_cluster.reuse.workers import Workers
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import NO_FLIGHT, SingleFlight
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.workers import InlineWorkers
from rakv_cluster.types import ChunkedPrompt, FinishReason

NAMESPACE = bytes(range(32))
LIMITS = ChunkLimits(min_tokens=4, max_tokens=8)


def no_cuts(vocab_size: int) -> CutTable:
    """A vocabulary without line ends: chunks are cut at their largest size only."""
    return CutTable(np.zeros(vocab_size, dtype=np.uint8))


def bare_engine(runner: Runner, *, token_bytes: TokenBytes = NO_BYTES) -> Engine:
    """A threaded engine, not started, without a store, on the system's clock."""
    clock = SystemClock()
    return Engine(
        runner,
        NullStore(),
        Speculator(CostTable(CostBuckets()), ControllerSettings(), clock),
        cuts=no_cuts(runner.vocab_size),
        limits=LIMITS,
        settings=EngineSettings(),
        clock=clock,
        numeric_class="fake",
        token_bytes=token_bytes,
    )


@dataclass(slots=True)
class Recording:
    """The events of one request with their (virtual) times, as a sink and in sum."""

    clock: Clock
    events: list[EngineEvent] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        """Raise ``ConnectionError`` from the next event on, as a caller with a bug would."""
        self.closed = True

    def __call__(self, event: EngineEvent) -> None:
        if self.closed:
            raise ConnectionError("the receiver is gone")
        if self.finish is not None:
            raise AssertionError("an event after the last one")
        self.events.append(event)
        self.times_s.append(self.clock.monotonic_s())

    @property
    def token_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return [token_id for event in self.events for token_id in event.token_ids]

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self.events[-1].finish if self.events else None

    @property
    def stats(self) -> RequestStats:
        """Of the last event that had any; raises ``LookupError`` before the first event."""
        for event in reversed(self.events):
            if event.stats is not None:
                return event.stats
        raise LookupError("no event with stats yet")


class EngineHarness:
    """:class:`EngineCore` on a manual clock; workers run inline unless given.

    The default speculator has no measured costs: it follows and learns, and drafts only where a
    request asks for a fixed number of drafts.

    A step without work takes a millisecond on the clock, one with work what the runner takes.
    """

    def __init__(
        self,
        runner: Runner,
        store: ChunkStore,
        clock: ManualClock,
        *,
        settings: EngineSettings,
        limits: ChunkLimits = LIMITS,
        loaders: Workers | None = None,
        savers: Workers | None = None,
        numeric_class: str = "fake",
        near_tie_eps: float = 0.0,
        flight: SingleFlight = NO_FLIGHT,
        speculator: Speculator | None = None,
        blending: BlendSupport = NO_BLENDING,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self.cuts = no_cuts(runner.vocab_size)
        self._names = 0
        self.core = EngineCore(
            runner,
            store,
            speculator or Speculator(CostTable(CostBuckets()), ControllerSettings(), clock),
            cuts=self.cuts,
            limits=limits,
            settings=settings,
            clock=clock,
            numeric_class=numeric_class,
            near_tie_eps=near_tie_eps,
            flight=flight,
            loaders=loaders or InlineWorkers(),
            savers=savers or InlineWorkers(),
            blending=blending,
        )

    def prompt(self, *segments: Sequence[int]) -> ChunkedPrompt:
        """Cut a prompt as an ingress would."""
        return chunk_prompt(NAMESPACE, segments, self.cuts, self.limits)

    def add(self, request: EngineRequest) -> Recording:
        """Check and queue a request; raises what the check raises."""
        recording = Recording(self.clock)
        self.core.add(self.core.prepare(request, recording))
        self.core.check_invariants()
        return recording

    def ask(self, prompt: ChunkedPrompt, max_tokens: int, **fields: object) -> Recording:
        """Queue a request with a name of its own and other ``fields`` of EngineRequest."""
        self._names += 1
        request = EngineRequest(f"request-{self._names}", prompt, max_tokens, **fields)  # type: ignore[arg-type]  # passed through
        return self.add(request)

    def step(self) -> bool:
        """One step of the core, its invariants checked."""
        worked = self.core.step()
        self.core.check_invariants()
        if not worked:
            self.clock.advance(1e-3)
        return worked

    def run(self, *recordings: Recording, step_limit: int = 2000) -> None:
        """Step until all ``recordings`` have ended; raises ``InvalidRequest`` at the limit."""
        for _ in range(step_limit):
            if all(recording.finish is not None for recording in recordings):
                return
            self.step()
        raise InvalidRequest(f"not finished after {step_limit} steps")
