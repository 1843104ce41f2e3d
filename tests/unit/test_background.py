"""Requests that nobody waits for give way to all others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rakv_cluster.engine.scheduler import Waiter, choose_victim, next_admission
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.types import FinishReason, ReuseMode

GRANULE = 8


SETTINGS = EngineSettings(
    kv_granule_tokens=GRANULE,
    growth_tokens=1,
    max_step_tokens=64,
    max_running=2,
    background_step_tokens=4,
)


def harness(
    settings: EngineSettings = SETTINGS, *, stored: bool = False
) -> tuple[EngineHarness, FakeRunner]:
    clock = ManualClock()
    runner = FakeRunner(clock=clock)
    store = MemoryStore(1 << 20, clock) if stored else NullStore()
    return EngineHarness(runner, store, clock, settings=settings), runner


def text(seed: int, length: int) -> list[int]:
    return [(seed * 17 + index * index) % 64 for index in range(length)]


def test_it_has_small_steps_while_nobody_else_has_work() -> None:
    engine, _ = harness()
    background = engine.ask(engine.prompt(text(1, 40)), 1, background=True)

    for _ in range(5):
        engine.step()

    assert engine.core.uncomputed_tokens == 0, "it is not what a router should wait for"
    assert background.finish is None
    engine.run(background)
    assert background.finish is FinishReason.LENGTH


def test_it_stands_still_beside_others_and_takes_no_seat() -> None:
    engine, runner = harness()
    background = engine.ask(engine.prompt(text(1, 40)), 1, background=True)
    engine.step()
    others = [engine.ask(engine.prompt(text(seed, 10)), 20) for seed in (2, 3)]

    engine.run(*others)

    assert background.finish is None
    assert max(other.stats.queue_ms for other in others) == 0
    engine.run(background)
    assert background.token_ids == runner.generate(text(1, 40), 1)


def test_after_a_while_it_is_one_like_others() -> None:
    engine, _ = harness(replace(SETTINGS, background_s=1.0))
    background = engine.ask(engine.prompt(text(1, 40)), 1, background=True)
    engine.step()
    engine.clock.advance(1.0)
    other = engine.ask(engine.prompt(text(2, 10)), 60)

    engine.run(background)

    assert other.finish is None


def test_its_memory_goes_to_who_needs_it() -> None:
    engine, runner = harness(replace(SETTINGS, kv_budget_bytes=6 * GRANULE * 32))
    background = engine.ask(engine.prompt(text(1, 40)), 1, background=True)
    engine.step()
    other = engine.ask(engine.prompt(text(2, 30)), 10)

    engine.run(other)

    assert background.finish is None
    assert engine.core.stats().counters.preemptions >= 1
    engine.run(background)
    assert background.token_ids == runner.generate(text(1, 40), 1)


@pytest.mark.parametrize("reuse", [ReuseMode.EXACT, ReuseMode.BLEND])
def test_nobody_waits_for_what_it_computes(reuse: ReuseMode) -> None:
    engine, runner = harness(stored=True)
    background = engine.ask(engine.prompt(text(1, 48)), 1, background=True)
    for _ in range(4):
        engine.step()
    other = engine.ask(engine.prompt(text(1, 48)), 2, reuse=reuse)

    engine.run(other)

    assert background.finish is None
    assert 0 < other.stats.ram_tokens < 40, "it takes what is there"
    assert other.token_ids == runner.generate(text(1, 48), 2)


def test_who_blends_does_not_wait_for_who_computes_exactly() -> None:
    engine, _ = harness(stored=True)
    first = engine.ask(engine.prompt(text(1, 300)), 1)
    engine.step()

    blended = engine.ask(engine.prompt(text(1, 300)), 1, reuse=ReuseMode.BLEND)
    engine.step()

    assert first.finish is None
    assert blended.finish is None
    assert engine.core.stats().counters.shared_tokens >= 64


def test_it_is_admitted_last_and_preempted_first() -> None:
    waiters = [Waiter(0, "", preempted=True, background=True), Waiter(1, "", preempted=False)]
    assert next_admission(waiters, {}) == 1
    assert choose_victim([0, 3, 5], needy=5, background=[0, 3]) == 3
    assert choose_victim([0, 3, 5], needy=5) == 5
