"""A first pass of the question chooses what is repaired, and leaves nothing else behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from rakv_cluster.chunking.boundaries import ChunkLimits
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.llama import llama_weights
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.step import Runner
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.probing import NOT_PROBED, ProbeSettings
from rakv_cluster.reuse.selection import Positions, Reused, most_attended, no_positions
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness, Recording
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_gemma3, tiny_llama
from rakv_cluster.types import BlendWish, ReuseMode

LIMITS = ChunkLimits(min_tokens=8, max_tokens=16)
TOKENS = 24
RECOMPUTE = 0.3


def text(seed: int, length: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(3, VOCAB_SIZE, length)]


SYSTEM, FIRST, SECOND, NEW, QUESTION = (
    text(seed, length) for seed, length in ((1, 20), (2, 48), (3, 48), (4, 21), (5, 9))
)
SHUFFLED = (SYSTEM, SECOND, NEW, FIRST, QUESTION)


class Note:
    """A selector that keeps what it was told and what it chose."""

    def __init__(self) -> None:
        self.reused: list[Reused] = []
        self.chosen: Positions = no_positions()

    def __call__(self, reused: Reused, count: int) -> Positions:
        self.reused.append(reused)
        self.chosen = most_attended(reused, count)
        return self.chosen


class Subject:
    def __init__(self, model: PreTrainedModel, runner: Runner) -> None:
        self.runner, self.rotation = runner, key_rotation(model, runner)

    def engine(self, support: BlendSupport, *, rows: int = 512) -> EngineHarness:
        """One that has seen both documents the other way round."""
        clock = ManualClock()
        settings = replace(EngineSettings(price_loads=False), max_step_tokens=rows)
        engine = EngineHarness(
            self.runner,
            MemoryStore(1 << 28, clock),
            clock,
            settings=settings,
            limits=LIMITS,
            blending=support,
        )
        engine.run(engine.ask(engine.prompt(SYSTEM, FIRST, SECOND, QUESTION), TOKENS))
        return engine

    def probed(self, selector: Callable[[Reused, int], Positions]) -> BlendSupport:
        layers = tuple(range(self.runner.layout.layers))
        return BlendSupport(self.rotation, probe=ProbeSettings(layers, selector, most_share=10.0))


def generic(model: PreTrainedModel) -> Runner:
    return TransformersRunner(model, observe_layout(model), context_tokens=2048)


def fused(model: PreTrainedModel) -> Runner:
    return FusedLlamaRunner(llama_weights(model))


CASES = {
    "llama": (tiny_llama, generic),
    "llama-fused": (tiny_llama, fused),
    "gemma3": (tiny_gemma3, generic),
}


@pytest.fixture(params=CASES)
def subject(request: pytest.FixtureRequest) -> Subject:
    build, runner_of = CASES[request.param]
    model = build()
    return Subject(model, runner_of(model))


def blend(engine: EngineHarness, recompute: float = RECOMPUTE, *, probe: bool = True) -> Recording:
    wish = BlendWish(recompute=recompute, probe=probe)
    answer = engine.ask(engine.prompt(*SHUFFLED), TOKENS, reuse=ReuseMode.BLEND, blend=wish)
    engine.run(answer)
    return answer


@pytest.mark.parametrize("rows", [512, 16])
def test_it_answers_as_if_the_repair_had_been_known(subject: Subject, rows: int) -> None:
    note = Note()
    probed = blend(subject.engine(subject.probed(note), rows=rows))

    told = BlendSupport(subject.rotation, selector=lambda _reused, _count: note.chosen)
    expected = blend(subject.engine(told))

    assert len(note.chosen) == round(RECOMPUTE * (len(FIRST) + len(SECOND)))
    assert probed.token_ids == expected.token_ids
    assert probed.stats.repaired_tokens == len(note.chosen)
    for name in ("blended_tokens", "computed_tokens", "ram_tokens", "approximate"):
        assert getattr(probed.stats, name) == getattr(expected.stats, name)


def test_the_selector_knows_the_questions_attention_to_every_position(subject: Subject) -> None:
    note = Note()
    blend(subject.engine(subject.probed(note)))

    (reused,) = note.reused
    # The reused share of nine rows' attention in two layers, the largest of four heads each.
    assert (reused.attention > 0).all()
    assert 0 < reused.attention.sum() < 2 * 4 * len(QUESTION)


def test_repaired_wholly_it_is_exact(subject: Subject) -> None:
    support = subject.probed(Note())

    whole = blend(subject.engine(support), recompute=1.0)

    engine = subject.engine(BlendSupport(subject.rotation))
    plain = engine.ask(engine.prompt(*SHUFFLED), TOKENS, reuse=ReuseMode.OFF)
    engine.run(plain)
    assert whole.token_ids == plain.token_ids


def test_exact_requests_get_nothing_of_either_pass(subject: Subject) -> None:
    engine = subject.engine(subject.probed(Note()))
    prompt = engine.prompt(*SHUFFLED)
    wish = BlendWish(recompute=RECOMPUTE)

    blended = engine.ask(prompt, TOKENS, reuse=ReuseMode.BLEND, blend=wish)
    engine.step()
    exact = engine.ask(prompt, TOKENS)
    engine.run(blended, exact)
    later = engine.ask(prompt, TOKENS)
    plain = engine.ask(prompt, TOKENS, reuse=ReuseMode.OFF)
    engine.run(later, plain)

    assert exact.token_ids == later.token_ids == plain.token_ids
    assert not exact.stats.approximate
    assert blended.stats.approximate


def test_a_request_may_do_without(subject: Subject) -> None:
    note = Note()

    blend(subject.engine(subject.probed(note)), probe=False)

    assert not note.reused


@pytest.mark.parametrize(("share", "selections"), [(0.01, 0), (10.0, 1)])
def test_a_probe_that_costs_too_large_a_part_is_left_out(share: float, selections: int) -> None:
    model = tiny_llama()
    note = Note()
    subject = Subject(model, generic(model))
    support = subject.probed(note)
    support = replace(support, probe=replace(support.probe, most_share=share))

    blend(subject.engine(support))

    assert len(note.reused) == selections
    assert not NOT_PROBED.layers
