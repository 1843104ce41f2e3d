"""A disk that reads more slowly than the model computes is left alone, once that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.store.base import Loaded, LoadItem
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness, Recording
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.workers import ManualWorkers
from rakv_cluster.types import BlendWish, ReuseMode

FRONT = [60, 61, 62, 63]
DOCUMENTS = [[(7 * d + i * i + 3 * i) % 58 for i in range(40)] for d in range(3)]
QUESTION = [59, 58]
SLOW_S = 30.0
"""A load takes so long; computing these prompts takes some hundredths of a second."""


class Throttled(MemoryStore):
    """Does something in the middle of each load."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(1 << 20, clock)
        self.during: Callable[[], object] = lambda: None

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        self.during()
        return super().load(items)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Throttled:
    return Throttled(clock)


def engine_on(store: Throttled, clock: ManualClock, loaders: ManualWorkers | None) -> EngineHarness:
    engine = EngineHarness(
        FakeRunner(clock=clock),
        store,
        clock,
        settings=EngineSettings(load_deadline_s=1.0),
        loaders=loaders,
        blending=BlendSupport(KeyRotation(torch.zeros(2, 1, dtype=torch.float64))),
    )
    first = engine.ask(engine.prompt(FRONT, *DOCUMENTS, QUESTION), 2)
    while first.finish is None:
        engine.step()
        if loaders is not None:
            loaders.run_all()
    return engine


def ask(engine: EngineHarness, reuse: ReuseMode) -> Recording:
    documents = DOCUMENTS[::-1] if reuse is ReuseMode.BLEND else DOCUMENTS
    prompt = engine.prompt(FRONT, *documents, QUESTION)
    return engine.ask(prompt, 2, reuse=reuse, blend=BlendWish(recompute=0.1))


@pytest.mark.parametrize("reuse", [ReuseMode.EXACT, ReuseMode.BLEND])
def test_a_slow_load_is_the_last_one(
    store: Throttled, clock: ManualClock, reuse: ReuseMode
) -> None:
    engine = engine_on(store, clock, None)
    store.during = lambda: clock.advance(SLOW_S)
    first = ask(engine, reuse)
    engine.run(first)
    assert first.stats.cached_tokens > 0

    answer = ask(engine, reuse)
    engine.run(answer)

    assert answer.stats.computed_tokens == answer.stats.prompt_tokens


@pytest.mark.parametrize("reuse", [ReuseMode.EXACT, ReuseMode.BLEND])
def test_so_is_one_that_was_given_up(
    store: Throttled, clock: ManualClock, reuse: ReuseMode
) -> None:
    loaders = ManualWorkers()
    engine = engine_on(store, clock, loaders)

    def give_up() -> None:
        store.during = lambda: None
        clock.advance(2.0)
        engine.step()

    store.during = give_up
    first = ask(engine, reuse)
    engine.step()
    loaders.run_one()
    assert engine.core.stats().counters.load_timeouts == 1
    engine.run(first)
    clock.advance(5.0)  # the store is asked again

    answer = ask(engine, reuse)
    engine.step()
    loaders.run_all()
    engine.run(answer)

    assert answer.stats.computed_tokens == answer.stats.prompt_tokens
