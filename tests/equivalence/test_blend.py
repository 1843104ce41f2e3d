"""Blending on real architectures: repaired wholly it is exact, and nothing of it reaches others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rakv_cluster.chunking.boundaries import ChunkLimits
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.step import Runner, Step
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.selection import first_of_runs
from rakv_cluster.reuse.traits import Trait, known
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import NAMESPACE, EngineHarness, Recording
from rakv_cluster.testing.runners import RUNNER_CASES, generic_runner
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_llama
from rakv_cluster.types import BlendWish, ReuseMode

LIMITS = ChunkLimits(min_tokens=8, max_tokens=16)
SETTINGS = EngineSettings(price_loads=False)
TOKENS = 24


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


SYSTEM, FIRST, SECOND, THIRD, QUESTION = (
    text(seed, length) for seed, length in ((1, 20), (2, 40), (3, 37), (4, 50), (5, 9))
)


@dataclass(frozen=True)
class Subject:
    runner: Runner
    support: BlendSupport

    def engine(self, *, with_store: bool = True) -> EngineHarness:
        clock = ManualClock()
        store = MemoryStore(1 << 28, clock) if with_store else NullStore()
        return EngineHarness(
            self.runner, store, clock, settings=SETTINGS, limits=LIMITS, blending=self.support
        )


def ask(engine: EngineHarness, *segments: list[int], recompute: float = -1.0) -> Recording:
    """A greedy request; blended if ``recompute`` is given."""
    reuse = ReuseMode.EXACT if recompute < 0 else ReuseMode.BLEND
    answer = engine.ask(
        engine.prompt(*segments), TOKENS, reuse=reuse, blend=BlendWish(recompute=recompute)
    )
    engine.run(answer)
    return answer


@pytest.fixture(params=RUNNER_CASES)
def subject(request: pytest.FixtureRequest) -> Subject:
    build, run = RUNNER_CASES[request.param]
    model = build()
    runner: Runner = run(model)
    return Subject(runner, BlendSupport(key_rotation(model, runner)))


def plain(subject: Subject, *segments: list[int]) -> list[int]:
    return ask(subject.engine(with_store=False), *segments).token_ids


def test_repaired_wholly_it_is_exact(subject: Subject) -> None:
    engine = subject.engine()
    ask(engine, SYSTEM, FIRST, SECOND, QUESTION)
    shuffled = (SYSTEM, SECOND, THIRD, FIRST, QUESTION)

    answer = ask(engine, *shuffled, recompute=1.0)

    assert answer.stats.ram_tokens == len(SYSTEM)
    assert answer.stats.repaired_tokens == len(FIRST) + len(SECOND)
    assert answer.stats.approximate
    assert answer.token_ids == plain(subject, *shuffled)


def test_what_is_reused_repaired_and_computed_adds_up(subject: Subject) -> None:
    engine = subject.engine()
    ask(engine, SYSTEM, FIRST, SECOND, QUESTION)

    stats = ask(engine, SYSTEM, SECOND, THIRD, FIRST, QUESTION, recompute=0.25).stats

    reused = len(FIRST) + len(SECOND)
    assert stats.repaired_tokens == round(0.25 * reused)
    assert stats.blended_tokens == reused - stats.repaired_tokens
    assert stats.computed_tokens == len(THIRD) + len(QUESTION) + stats.repaired_tokens
    assert stats.cached_tokens == len(SYSTEM) + stats.blended_tokens


def test_repair_brings_the_answer_closer(subject: Subject) -> None:
    """Moved KV alone differs from exact KV; else the other tests here would show nothing."""
    engine = subject.engine()
    ask(engine, SYSTEM, FIRST, SECOND, THIRD, QUESTION)
    shuffled = (SYSTEM, THIRD, SECOND, FIRST, QUESTION)

    assert ask(engine, *shuffled, recompute=0.0).token_ids != plain(subject, *shuffled)


def test_exact_requests_get_nothing_of_a_blend(subject: Subject) -> None:
    engine = subject.engine()
    ask(engine, SYSTEM, FIRST, SECOND, QUESTION)
    shuffled = (SYSTEM, SECOND, FIRST, QUESTION)
    blended = ask(engine, *shuffled, recompute=0.1)
    later = ask(engine, *shuffled, [*QUESTION, *blended.token_ids], THIRD, recompute=0.1)

    exact = ask(engine, *shuffled)

    assert later.stats.ram_tokens == len(SYSTEM)
    assert exact.stats.ram_tokens == len(SYSTEM)
    assert exact.token_ids == plain(subject, *shuffled)
    assert not exact.stats.approximate


def test_a_blend_at_work_is_nobodys_prefix(subject: Subject) -> None:
    engine = subject.engine()
    ask(engine, SYSTEM, FIRST, SECOND, QUESTION)
    shuffled = (SYSTEM, SECOND, FIRST, QUESTION)
    prompt = engine.prompt(*shuffled)

    blended = engine.ask(prompt, 3 * TOKENS, reuse=ReuseMode.BLEND, blend=BlendWish(recompute=0.1))
    while not blended.token_ids:
        engine.step()
    exact = engine.ask(prompt, TOKENS)
    engine.run(blended, exact)

    assert exact.token_ids == plain(subject, *shuffled)


def test_a_second_prefix_teaches_sensitivity(subject: Subject) -> None:
    clock = ManualClock()
    store = MemoryStore(1 << 28, clock)
    engine = EngineHarness(
        subject.runner, store, clock, settings=SETTINGS, limits=LIMITS, blending=subject.support
    )
    (chunk,) = engine.prompt(FIRST[:16], QUESTION).chunks
    ask(engine, SYSTEM, FIRST[:16], QUESTION)
    (before,) = known(NAMESPACE, Trait.SENSITIVITY, [chunk.token_ids], store)
    ask(engine, THIRD, FIRST[:16], QUESTION)
    (after,) = known(NAMESPACE, Trait.SENSITIVITY, [chunk.token_ids], store)

    assert np.isnan(before).all()
    assert after.shape == (16,)
    assert after.min() >= 0
    # Relative to the mean of each layer; the first layer's values have no context.
    assert 0.4 < after.mean() <= 1.001


@pytest.mark.parametrize("rows", [16, 512])
def test_a_selector_is_obeyed_wherever_it_points(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered rows over loaded slots: every share of first tokens, in steps of a few rows."""
    model = tiny_llama()
    runner = generic_runner(model)
    clock = ManualClock()
    engine = EngineHarness(
        runner,
        MemoryStore(1 << 28, clock),
        clock,
        settings=replace(SETTINGS, max_step_tokens=rows),
        limits=LIMITS,
        blending=BlendSupport(key_rotation(model, runner), selector=first_of_runs),
    )
    ask(engine, SYSTEM, FIRST, SECOND, QUESTION)
    computed: list[int] = []
    forward = runner.forward

    def noting(step: Step) -> torch.Tensor:
        computed.extend(step.positions.tolist())
        return forward(step)

    monkeypatch.setattr(runner, "forward", noting)
    second, first = 20, 20 + len(SECOND)
    question = first + len(FIRST)
    for fraction in (0.1, 0.5, 0.9):
        computed.clear()
        answer = ask(engine, SYSTEM, SECOND, FIRST, QUESTION, recompute=fraction)

        # Equally many of each document's first tokens, then the question and the answer.
        repaired = [place for place in computed if place < question]
        each = answer.stats.repaired_tokens // 2
        assert repaired[:each] == list(range(second, second + each))
        assert repaired[-each:] == list(range(first, first + each))
        assert len(repaired) == answer.stats.repaired_tokens
        assert computed[len(repaired) : len(repaired) + len(QUESTION)] == list(
            range(question, question + len(QUESTION))
        )


def test_a_model_that_is_not_calibrated_is_computed_exactly_and_says_so(
    subject: Subject,
) -> None:
    engine = subject.engine()
    ask(engine, SYSTEM, FIRST, SECOND, QUESTION)
    shuffled = (SYSTEM, SECOND, FIRST, QUESTION)

    answer = engine.ask(engine.prompt(*shuffled), TOKENS, reuse=ReuseMode.BLEND)
    engine.run(answer)

    assert "not calibrated" in answer.stats.blend_refusal
    assert not answer.stats.approximate
    assert answer.token_ids == plain(subject, *shuffled)


def test_text_quoted_inside_other_text_is_found(subject: Subject) -> None:
    clock = ManualClock()
    limits = ChunkLimits(min_tokens=32, max_tokens=40)
    engine = EngineHarness(
        subject.runner,
        MemoryStore(1 << 28, clock),
        clock,
        settings=SETTINGS,
        limits=limits,
        blending=subject.support,
    )
    ask(engine, SYSTEM, FIRST, QUESTION)
    quoting = [*text(8, 11), *FIRST, *text(9, 30)]

    kept = ask(engine, SYSTEM, quoting, QUESTION, recompute=0.0)
    whole = ask(engine, SYSTEM, quoting, QUESTION, recompute=1.0)

    assert kept.stats.blended_tokens == len(FIRST)
    assert whole.stats.repaired_tokens == len(FIRST)
    assert whole.token_ids == plain(subject, SYSTEM, quoting, QUESTION)
