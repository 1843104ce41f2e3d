"""A request that ends while its load is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.reuse.flights import FlightLimits
from rakv_cluster.store.flight import Claim
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.workers import ManualWorkers
from rakv_cluster.types import FinishReason

PROMPT = [(index * 5 + 1) % 64 for index in range(40)]


class HeldLeases:
    """A flight that grants everything, after something else has happened."""

    def __init__(self) -> None:
        self.held: dict[bytes, str] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def claim(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> Claim:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.held |= dict.fromkeys(keys, holder)
        return Claim(tuple(keys), {})

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        for key in keys:
            if self.held.get(key) == holder:
                del self.held[key]


def test_leases_that_are_granted_after_the_end_are_given_back() -> None:
    clock, flight, loaders = ManualClock(), HeldLeases(), ManualWorkers()
    engine = EngineHarness(
        FakeRunner(clock=clock),
        MemoryStore(1 << 24, clock),
        clock,
        settings=EngineSettings(flight=FlightLimits(min_compute_ms=0.0)),
        flight=flight,
        loaders=loaders,
    )
    answer = engine.ask(engine.prompt(PROMPT), 5)
    engine.step()
    flight.meanwhile = lambda: engine.core.cancel("request-1")

    loaders.run_all()

    assert answer.finish is FinishReason.CANCELLED
    assert flight.held == {}
