"""A first pass of the question chooses what is repaired, and leaves nothing else behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rakv_cluster.chunking.boundaries import ChunkLimits
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.buffer import KvBuffer, Positions, no_positions
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.model.watch import AttentionWatch
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.probing import NOT_PROBED, ProbeSettings
from rakv_cluster.reuse.selection import Reused, most_attended
from rakv_cluster.reuse.traits import Trait, known
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import NAMESPACE, EngineHarness, Recording
from rakv_cluster.testing.runners import RUNNER_CASES, generic_runner
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_llama
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
        self.store = MemoryStore(1 << 28, ManualClock())

    def engine(self, support: BlendSupport, *, rows: int = 512) -> EngineHarness:
        """One that has seen both documents the other way round."""
        clock = ManualClock()
        self.store = MemoryStore(1 << 28, clock)
        settings = replace(EngineSettings(price_loads=False), max_step_tokens=rows)
        engine = EngineHarness(
            self.runner,
            self.store,
            clock,
            settings=settings,
            limits=LIMITS,
            blending=support,
        )
        engine.run(engine.ask(engine.prompt(SYSTEM, FIRST, SECOND, QUESTION), TOKENS))
        return engine

    def importance(self, engine: EngineHarness, *segments: list[int]) -> dict[int, np.ndarray]:
        """What the last engine's store knows of each chunk of a prompt, by its start."""
        chunks = engine.prompt(*segments).chunks
        contents = [chunk.token_ids for chunk in chunks]
        found = known(NAMESPACE, Trait.IMPORTANCE, contents, self.store)
        return {chunk.start: each for chunk, each in zip(chunks, found, strict=True)}

    def probed(self, selector: Callable[[Reused, int], Positions]) -> BlendSupport:
        layers = tuple(range(self.runner.layout.layers))
        return BlendSupport(self.rotation, probe=ProbeSettings(layers, selector, most_share=10.0))


@pytest.fixture(params=RUNNER_CASES)
def subject(request: pytest.FixtureRequest) -> Subject:
    build, runner_of = RUNNER_CASES[request.param]
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
    assert probed.stats.probed
    assert not expected.stats.probed
    for name in ("blended_tokens", "computed_tokens", "ram_tokens", "approximate"):
        assert getattr(probed.stats, name) == getattr(expected.stats, name)


def test_the_selector_knows_the_questions_attention_to_every_position(subject: Subject) -> None:
    note = Note()
    blend(subject.engine(subject.probed(note)))

    (reused,) = note.reused
    # The reused share of a row's attention, the largest of four heads each.
    assert (reused.attention > 0).all()
    assert 0 < reused.attention.sum() < 4


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
    subject = Subject(model, generic_runner(model))
    support = subject.probed(note)
    support = replace(support, probe=replace(support.probe, most_share=share))

    blend(subject.engine(support))

    assert len(note.reused) == selections
    assert not NOT_PROBED.layers


def test_what_a_question_attends_to_is_learned_while_its_prompt_is_computed(
    subject: Subject,
) -> None:
    engine = subject.engine(subject.probed(Note()))

    found = subject.importance(engine, SYSTEM, FIRST, SECOND, QUESTION)

    ids = torch.tensor([*SYSTEM, *FIRST, *SECOND, *QUESTION])
    start = len(ids) - len(QUESTION)
    watch = AttentionWatch(range(subject.runner.layout.layers), start)
    span = Span(KvBuffer(torch.zeros(subject.runner.layout.shape(192))), 0, len(ids), 0,
                len(ids) - 1, watch)  # fmt: skip
    wanted = torch.tensor([], dtype=torch.int64)
    subject.runner.forward(Step(ids, torch.arange(len(ids)), (span,), wanted))
    expected = watch.figures(len(ids)).numpy()
    assert min(found) == 0
    assert max(found) < start
    for at, figures in found.items():
        np.testing.assert_allclose(figures, expected[at : at + len(figures)], rtol=1e-3, atol=1e-6)


def test_a_prompt_that_is_mostly_cached_is_not_watched(subject: Subject) -> None:
    engine = subject.engine(subject.probed(Note()))
    longer = (SYSTEM, FIRST, SECOND, NEW, QUESTION)

    engine.run(engine.ask(engine.prompt(*longer), TOKENS))

    found = subject.importance(engine, *longer)
    behind = len(SYSTEM) + len(FIRST) + len(SECOND)
    assert all(np.isnan(figures).all() == (at >= behind) for at, figures in found.items())


def test_without_watched_layers_nothing_is_learned(subject: Subject) -> None:
    engine = subject.engine(BlendSupport(subject.rotation))

    found = subject.importance(engine, SYSTEM, FIRST, SECOND, QUESTION)

    assert all(np.isnan(figures).all() for figures in found.values())


def test_the_default_repairs_what_earlier_questions_attended_to(subject: Subject) -> None:
    note = Note()
    support = replace(subject.probed(note), selector=note)

    blend(subject.engine(support), probe=False)

    (reused,) = note.reused
    assert (reused.importance > 0).all()
    assert np.isnan(reused.attention).all()
