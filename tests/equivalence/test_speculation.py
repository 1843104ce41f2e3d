"""Whatever is drafted, every request gets the tokens it would get without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rakv_cluster.clock import Clock
from rakv_cluster.engine.request import EngineEvent
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.four_bit import four_bit_runner
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.sampling import TokenRule
from rakv_cluster.model.step import Runner, Step
from rakv_cluster.speculation.confidence import EDGES
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable
from rakv_cluster.speculation.draft_model import DraftModel
from rakv_cluster.speculation.draft_rounds import DraftState, DraftWish, ModelDrafter, Stopping
from rakv_cluster.speculation.drafters import (
    NO_DRAFT,
    Draft,
    Drafter,
    NullDrafter,
    SuffixDrafter,
)
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.speculation.self_draft import SelfDraft
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness, Recording
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_gemma3, tiny_llama
from rakv_cluster.types import ReuseMode, SamplingParams

GRANULE = 16
UNGOVERNED = ControllerSettings(governor=GovernorSettings(GovernorMode.THROUGHPUT))


@dataclass(frozen=True)
class Ask:
    """A request; equal texts share prefixes, so that reuse is in the mix."""

    text: int
    length: int
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingParams
    mode: SpeculationMode
    top_logprobs: int

    def prompt(self, vocab_size: int) -> list[int]:
        return [(self.text + 1) * (index * index + 3) % vocab_size for index in range(self.length)]


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 3),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
asks = st.builds(
    Ask,
    text=st.integers(0, 2),
    length=st.integers(1, 30),
    max_tokens=st.integers(1, 30),
    min_tokens=st.integers(0, 12),
    stop_ids=st.frozensets(st.integers(0, 4), max_size=2),
    sampling=sampling_params,
    mode=st.sampled_from(["auto", "auto", "1", "2", "4", "8", "off"]),
    top_logprobs=st.sampled_from([-1, 0, 2]),
)


class KnowingDrafter:
    """Knows how each text goes on; drafts any length of it, sometimes with a mistake."""

    def __init__(self, texts: Sequence[list[int]], chance: random.Random) -> None:
        self._texts = texts
        self._chance = chance
        self._seen: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._seen += token_ids

    def propose(self, max_tokens: int) -> Draft:
        count = len(self._seen)
        known = [text for text in self._texts if text[:count] == self._seen]
        if not known or max_tokens <= 0:
            return NO_DRAFT
        drafts = self._chance.choice(known)[count : count + self._chance.randint(1, max_tokens)]
        if drafts and self._chance.random() < 0.3:
            wrong = self._chance.randrange(len(drafts))
            drafts[wrong] = (drafts[wrong] + 1) % 5
        return Draft(tuple(drafts), 8) if drafts else NO_DRAFT


NewModel = Callable[[Clock], ModelDrafter]


def free_costs() -> CostTable:
    """A table by which rows cost nothing, so that every draft is worth taking."""
    table = CostTable(CostBuckets())
    for rows in table.buckets.rows:
        table.observe(CostSample(rows, 1, 1, 10.0))
    return table


def serve(
    runner: Runner,
    requests: Sequence[Ask],
    *,
    speculate: bool,
    texts: Sequence[list[int]] = (),
    chance: random.Random | None = None,
    engine_settings: EngineSettings | None = None,
    new_model: NewModel | None = None,
) -> list[Recording]:
    """All requests through one engine at once; with ``texts``, drafted from what they say, and
    by the model that ``new_model`` makes where that drafter knows nothing."""
    clock = ManualClock()
    luck = chance or random.Random(0)
    draft_model = new_model(clock) if new_model is not None else None

    def new_drafter() -> Drafter:
        if draft_model is not None and luck.random() < 0.5:
            return NullDrafter()
        return KnowingDrafter(texts, luck) if texts and luck.random() < 0.8 else SuffixDrafter()

    engine = EngineHarness(
        runner,
        MemoryStore(1 << 22, clock),
        clock,
        settings=engine_settings or EngineSettings(),
        speculator=Speculator(free_costs(), UNGOVERNED, clock, new_drafter, draft_model),
    )
    answers = [
        engine.ask(
            engine.prompt(ask.prompt(runner.vocab_size)),
            ask.max_tokens,
            sampling=ask.sampling,
            min_tokens=ask.min_tokens,
            stop_token_ids=ask.stop_ids,
            reuse=ReuseMode.EXACT if speculate else ReuseMode.OFF,
            top_logprobs=ask.top_logprobs,
            speculation=ask.mode if speculate else "off",
        )
        for ask in requests
    ]
    engine.run(*answers)
    assert engine.core.stats().kv_leased_bytes == 0
    assert not isinstance(draft_model, DraftModel) or draft_model.leased_bytes == 0
    return answers


def last(answer: Recording) -> EngineEvent:
    return answer.events[-1]


def assert_equal_answers(ask: Ask, drafted: Recording, plain: Recording) -> None:
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish is plain.finish
    assert last(drafted).stop_token_id == last(plain).stop_token_id
    assert drafted.stats.output_tokens == len(drafted.token_ids)
    # The first token's step is no decode step; a step that only chose the stop token is one.
    emitted = sum((block.accepted + 1) * block.steps for block in drafted.stats.blocks)
    assert emitted >= len(drafted.token_ids) - 1
    found = [entry for event_ in drafted.events for entry in event_.logprobs]
    expected = [entry for event_ in plain.events for entry in event_.logprobs]
    assert len(found) == len(expected) == (len(plain.token_ids) if ask.top_logprobs >= 0 else 0)
    for entry, other in zip(found, expected, strict=True):
        assert entry.token_id == other.token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]


def assert_as_without_drafts(
    runner: Runner,
    requests: Sequence[Ask],
    seed: int,
    engine_settings: EngineSettings,
    new_model: NewModel | None = None,
) -> None:
    plain = [serve(runner, [ask], speculate=False)[0] for ask in requests]
    texts = [
        ask.prompt(runner.vocab_size) + answer.token_ids
        for ask, answer in zip(requests, plain, strict=True)
    ]

    drafted = serve(
        runner,
        requests,
        speculate=True,
        texts=texts,
        chance=random.Random(seed),
        engine_settings=engine_settings,
        new_model=new_model,
    )

    for ask, answer, expected in zip(requests, drafted, plain, strict=True):
        assert_equal_answers(ask, answer, expected)
    accepted = max(
        (block.accepted for answer in drafted for block in answer.stats.blocks), default=0
    )
    event(f"longest accepted: {'>= 8' if accepted >= 8 else '1-7' if accepted else '0'}")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(asks, min_size=1, max_size=4),
    st.integers(0, 1_000),
    st.builds(
        EngineSettings,
        kv_budget_bytes=st.integers(6, 16).map(lambda granules: granules * GRANULE * 32),
        kv_granule_tokens=st.just(GRANULE),
        max_running=st.integers(1, 4),
        max_step_tokens=st.sampled_from([4, 16, 64, 64]),
        min_prefill_tokens=st.integers(1, 4),
        growth_tokens=st.sampled_from([1, GRANULE]),
    ),
)
def test_exact_model(requests: list[Ask], seed: int, engine_settings: EngineSettings) -> None:
    """On arithmetic without rounding: any batch, preemption, reuse, drafts right or wrong."""
    assert_as_without_drafts(FakeRunner(vocab_size=5), requests, seed, engine_settings)


tight_engines = st.builds(
    EngineSettings,
    kv_budget_bytes=st.integers(6, 16).map(lambda granules: granules * GRANULE * 32),
    kv_granule_tokens=st.just(GRANULE),
    max_running=st.integers(1, 4),
    growth_tokens=st.sampled_from([1, GRANULE]),
)
"""Memory for few of the requests: preemption, and few running together."""


class OftenRight(FakeRunner):
    """A draft model: the target's logits, shifted by a token at every third position."""

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        wrong = step.positions[step.logit_rows] % 3 == 0
        return torch.where(wrong[:, None], logits.roll(1, dims=-1), logits)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(asks, min_size=1, max_size=4),
    st.integers(0, 1_000),
    tight_engines,
)
def test_both_drafters(requests: list[Ask], seed: int, engine_settings: EngineSettings) -> None:
    """A draft model beside the others, its memory too small for all: any batch and K."""

    def new_model(clock: Clock) -> DraftModel:
        return DraftModel(OftenRight(vocab_size=5), clock, kv_budget_bytes=1 << 16)

    assert_as_without_drafts(FakeRunner(vocab_size=5), requests, seed, engine_settings, new_model)


class Smudging(OftenRight):
    """What it writes is never what the target would have written."""

    def forward(self, step: Step) -> torch.Tensor:
        logits = super().forward(step)
        for span in step.spans:
            span.buffer.data[:, :, :, span.first_position : span.last_position + 1] += 1
        return logits


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(asks, min_size=1, max_size=4),
    st.integers(0, 1_000),
    tight_engines,
)
def test_self_drafts(requests: list[Ask], seed: int, engine_settings: EngineSettings) -> None:
    """Drafts written into the target's own KV, all of it wrong: any batch, K and preemption."""

    def new_model(clock: Clock) -> SelfDraft:
        return SelfDraft(Smudging(vocab_size=5), clock)

    assert_as_without_drafts(FakeRunner(vocab_size=5), requests, seed, engine_settings, new_model)


def runner_of(build: Callable[[], object]) -> TransformersRunner:
    model = build()
    return TransformersRunner(model, observe_layout(model), context_tokens=256)  # type: ignore[arg-type]  # transformers models are untyped here


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3])
def tiny_runner(request: pytest.FixtureRequest) -> TransformersRunner:
    return runner_of(request.param)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(requests=st.lists(asks, min_size=1, max_size=3), seed=st.integers(0, 1_000))
def test_tiny_models(tiny_runner: TransformersRunner, requests: list[Ask], seed: int) -> None:
    """On real architectures: grouped heads, sliding windows, rows packed with other requests'."""
    assert_as_without_drafts(tiny_runner, requests, seed, EngineSettings())


@pytest.mark.parametrize("mode", ["1", "2", "4", "8", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_certain_drafts_are_all_accepted(mode: SpeculationMode, temperature: float) -> None:
    """A drafter that says what the target says: 100% acceptance, greedy and sampled."""
    runner = FakeRunner(vocab_size=64)
    sampling = SamplingParams(temperature=temperature, seed=5)
    ask = Ask(1, 20, 40, 0, frozenset(), sampling, mode, -1)
    (plain,) = serve(runner, [ask], speculate=False)
    text = ask.prompt(64) + plain.token_ids

    class Certain(KnowingDrafter):
        def propose(self, max_tokens: int) -> Draft:
            start = len(self._seen)
            return Draft(tuple(text[start : start + max_tokens]), 8)

    clock = ManualClock()
    engine = EngineHarness(
        runner,
        MemoryStore(1 << 22, clock),
        clock,
        settings=EngineSettings(),
        speculator=Speculator(
            free_costs(), UNGOVERNED, clock, lambda: Certain([], random.Random())
        ),
    )
    answer = engine.ask(engine.prompt(ask.prompt(64)), 40, sampling=sampling, speculation=mode)
    engine.run(answer)

    assert answer.token_ids == plain.token_ids
    steps = sum((block.accepted + 1) * block.steps for block in answer.stats.blocks)
    assert steps == answer.stats.output_tokens - 1
    assert all(block.accepted == block.drafted for block in answer.stats.blocks)
    longest = max(block.drafted for block in answer.stats.blocks)
    assert longest == (15 if mode == "auto" else int(mode))


@pytest.fixture(scope="module")
def uniform_runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = save_tiny_model(tmp_path_factory.mktemp("uniform") / "tiny", tiny_llama())
    loaded = load_model(str(folder), threads=1)
    assert "uniform" in loaded.card.numeric_class
    return loaded.runner


def test_a_trace_tells_every_step() -> None:
    runner = FakeRunner(vocab_size=64)
    ask = Ask(1, 20, 40, 0, frozenset(), SamplingParams(temperature=0.0), "trace", -1)
    (plain,) = serve(runner, [ask], speculate=False)
    text = ask.prompt(64) + plain.token_ids

    (answer,) = serve(runner, [ask], speculate=True, texts=[text], chance=random.Random(1))

    assert answer.token_ids == plain.token_ids
    trace = answer.stats.trace
    assert sum(step.accepted + 1 for step in trace) == 39  # the first token comes with the prompt
    assert sum(step.drafts for step in trace) == answer.stats.text_drafts > 0
    assert all(0 <= step.accepted <= step.drafts <= step.available for step in trace)
    assert all(step.batch == 1 and step.base_ms > 0 and step.predicted_ms > 0 for step in trace)
    assert {step.drafts > 0 for step in trace if step.reason == "drafted"} == {True}


@pytest.mark.parametrize("mode", ["1", "2", "4", "8", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["exact", "uniform"])
@pytest.mark.parametrize("own_kv", [True, False])
def test_a_draft_model_equal_to_the_target_is_always_right(
    mode: SpeculationMode, temperature: float, kind: str, own_kv: bool, uniform_runner: Runner
) -> None:
    """At every K, greedy and sampled, with penalties, over batches, and behind a reused prefix;
    on arithmetic without rounding, and on kernels that round alike whatever the rows; over KV of
    its own and over the target's."""
    runner = uniform_runner if kind == "uniform" else FakeRunner(vocab_size=64)
    clock = ManualClock()
    draft_model: ModelDrafter = SelfDraft(runner, clock)
    if own_kv:
        draft_model = DraftModel(runner, clock, kv_budget_bytes=1 << 24)
    engine = EngineHarness(
        runner,
        MemoryStore(1 << 22, clock),
        clock,
        settings=EngineSettings(),
        speculator=Speculator(free_costs(), UNGOVERNED, clock, NullDrafter, draft_model),
    )
    requests = [
        Ask(text, length, 40, 0, frozenset(),
            SamplingParams(temperature=temperature, seed=seed, frequency_penalty=0.3), mode, -1)
        for text, length, seed in ((1, 30, 5), (1, 30, 6), (2, 17, 7))
    ]  # fmt: skip
    plain = [serve(runner, [ask], speculate=False)[0] for ask in requests]

    for _ in range(2):  # the second time all prompts are found in the store
        answers = [
            engine.ask(
                engine.prompt(ask.prompt(runner.vocab_size)),
                40,
                sampling=ask.sampling,
                speculation=mode,
            )
            for ask in requests
        ]
        engine.run(*answers)

        assert [each.token_ids for each in answers] == [each.token_ids for each in plain]
        blocks = [block for answer in answers for block in answer.stats.blocks]
        assert all(block.accepted == block.drafted for block in blocks)
        drafted = sum(block.drafted * block.steps for block in blocks)
        assert sum(answer.stats.model_drafts for answer in answers) == drafted
        if mode != "auto":
            assert max(block.drafted for block in blocks) == int(mode)
    assert not isinstance(draft_model, DraftModel) or draft_model.leased_bytes == 0


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(requests=st.lists(asks, min_size=1, max_size=3), seed=st.integers(0, 1_000))
def test_drafts_of_a_tiny_model_in_four_bits(
    uniform_runner: Runner, requests: list[Ask], seed: int
) -> None:
    """Real rounding: four-bit K/V stand in the buffer until the very step that reads them."""
    four_bits = four_bit_runner(uniform_runner)

    assert_as_without_drafts(
        uniform_runner, requests, seed, EngineSettings(), lambda clock: SelfDraft(four_bits, clock)
    )


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_default_model_drafting_for_itself(default_model: LoadedModel, temperature: float) -> None:
    """Its weights in four bits guess most tokens, and change none."""
    prompt_ids = default_model.tokenizer("The three laws of thermodynamics are")["input_ids"]
    four_bits = four_bit_runner(default_model.runner)
    answers = {}
    modes: tuple[SpeculationMode, ...] = ("off", "2", "4")
    for mode in modes:
        clock = ManualClock()
        engine = EngineHarness(
            default_model.runner,
            MemoryStore(1 << 28, clock),
            clock,
            settings=EngineSettings(),
            speculator=Speculator(
                free_costs(), UNGOVERNED, clock, NullDrafter, SelfDraft(four_bits, clock)
            ),
        )
        answers[mode] = engine.ask(
            engine.prompt(prompt_ids),
            32,
            sampling=SamplingParams(temperature=temperature, seed=3),
            speculation=mode,
        )
        engine.run(answers[mode])

    assert answers["2"].token_ids == answers["4"].token_ids == answers["off"].token_ids
    assert answers["4"].stats.model_drafts > 0
    assert answers["2"].stats.accepted_tokens > 10


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_default_model_as_its_own_draft_model(
    default_model: LoadedModel, temperature: float
) -> None:
    """Its second copy of the KV goes out of step nowhere: every draft is accepted."""
    prompt_ids = default_model.tokenizer("The three laws of thermodynamics are")["input_ids"]
    for mode in ("1", "4", "8"):
        clock = ManualClock()
        draft_model = DraftModel(default_model.runner, clock, kv_budget_bytes=1 << 28)
        engine = EngineHarness(
            default_model.runner,
            MemoryStore(1 << 28, clock),
            clock,
            settings=EngineSettings(),
            speculator=Speculator(free_costs(), UNGOVERNED, clock, NullDrafter, draft_model),
        )
        answer = engine.ask(
            engine.prompt(prompt_ids),
            32,
            sampling=SamplingParams(temperature=temperature, seed=3),
            speculation=mode,
        )
        engine.run(answer)

        assert all(block.accepted == block.drafted for block in answer.stats.blocks)
        assert max(block.drafted for block in answer.stats.blocks) == int(mode)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_default_model(default_model: LoadedModel, temperature: float) -> None:
    """The real model copying a text, every fixed number of drafts and the controller's own."""
    text = "def area(width, height):\n    return width * height\n\nprint(area(2, 3))\n"
    messages = [{"role": "user", "content": f"Repeat this code twice, exactly:\n{text}"}]
    prompt_ids = default_model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    sampling = SamplingParams(temperature=temperature, seed=11)

    def answer(*modes: SpeculationMode) -> list[Recording]:
        clock = ManualClock()
        engine = EngineHarness(
            default_model.runner,
            MemoryStore(1 << 28, clock),
            clock,
            settings=EngineSettings(),
            speculator=Speculator(free_costs(), UNGOVERNED, clock),
        )
        answers = [
            engine.ask(engine.prompt(prompt_ids), 40, sampling=sampling, speculation=mode)
            for mode in modes
        ]
        engine.run(*answers)
        return answers

    (plain,) = answer("off")
    drafted = [*answer("8"), *answer("1", "4", "auto")]

    assert [each.token_ids for each in drafted] == [plain.token_ids] * len(drafted)
    assert sum(block.accepted for each in drafted for block in each.stats.blocks) > 15


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_end_where_the_model_is_unsure(temperature: float, uniform_runner: Runner) -> None:
    rule = TokenRule(SamplingParams(temperature=temperature, seed=3), [], uniform_runner.vocab_size)
    subject = DraftModel(uniform_runner, ManualClock(), kv_budget_bytes=1 << 24)
    bands = len(EDGES) + 1

    def drafts(stopping: Stopping | None) -> Draft:
        (draft,) = subject.draft([DraftWish(DraftState(rule, [1, 2, 3]), 4, stopping=stopping)])
        return draft

    fixed, sure = drafts(None), drafts(Stopping(6, 0.3, (1.0,) * bands))
    unsure = drafts(Stopping(6, 0.3, (0.5,) * bands))  # 0.5 that one is right, 0.25 that two are

    assert (len(fixed.token_ids), fixed.confidences) == (4, ())
    assert len(sure.token_ids) == len(sure.confidences) == 6
    assert unsure.token_ids == sure.token_ids[:2] == fixed.token_ids[:2]
    assert all(0 < each <= 1 for each in sure.confidences)
