"""Exact mode: the engine's tokens are those of plain one-token decoding without a cache.

The reference runs the stock transformers model. Each scenario runs on two tiny random models and
on the default model; chunks are small so that every border case fits a short prompt.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import SystemClock
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.model.step import Runner
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import (
    SPECULATION_MODES,
    SpeculationMode,
    Speculator,
)
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.lmdb_shard import LmdbStore
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.shard_writer import ShardSettings, ShardWriter
from rakv_cluster.testing.engine import NAMESPACE
from rakv_cluster.testing.faulty_store import Fault, FaultyStore
from rakv_cluster.testing.tiny_models import tiny_gemma3, tiny_llama
from rakv_cluster.types import ChunkedPrompt, FinishReason, SamplingParams

LIMITS = ChunkLimits(min_tokens=16, max_tokens=32)
CHUNK = LIMITS.max_tokens
WAIT_S = 120.0
GREEDY = SamplingParams()
MIXES = int(os.environ.get("MIXES", "200"))
"""Random mixes per tiny model, and a tenth of it on the real one."""
PARTS = 5
"""Of the mixes, each a test: all together take longer on a busy machine than one test may."""
TEXT = (
    "The lighthouse keeper wrote down every ship that passed. In the spring of 1907 there were "
    "forty-one of them, most carrying timber and wool; two never reached the harbour. He kept a "
    "second book for the weather, and a third, which nobody was allowed to read, for the birds. "
    "When the lamp was made electric the company asked for all three books. It got the first two. "
)


@dataclass(frozen=True)
class Subject:
    """A model twice: behind our runner, and untouched as the reference; and some text for it."""

    runner: Runner
    stock: PreTrainedModel
    cuts: CutTable
    ids: tuple[int, ...]
    mixes: int
    _known: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def reference(
        self, prompt: Sequence[int], tokens: int, params: SamplingParams = GREEDY
    ) -> list[int]:
        """The right continuation; greedy ones are kept, the same prompts come again."""
        if params is not GREEDY:
            return self._decode(prompt, tokens, params)
        key = (tuple(prompt), tokens)
        if key not in self._known:
            self._known[key] = self._decode(prompt, tokens, params)
        return self._known[key]

    @torch.inference_mode()
    def _decode(self, prompt: Sequence[int], tokens: int, params: SamplingParams) -> list[int]:
        """One token at a time, by the stock forward and the one rule."""
        rule = TokenRule(params, prompt, self.runner.vocab_size)
        ids, cache = list(prompt), DynamicCache()
        fresh = ids
        for _ in range(tokens):
            logits = (
                self.stock(input_ids=torch.tensor([fresh]), cache=cache, use_cache=True)
                .logits[:, -1]
                .float()
            )
            (choice,) = choose(logits, [RuleRow(rule, position=len(ids))])
            rule.accept(choice.token_id)
            fresh = [choice.token_id]
            ids += fresh
        return ids[len(prompt) :]

    def prompt(self, *segments: Sequence[int]) -> ChunkedPrompt:
        return chunk_prompt(NAMESPACE, segments, self.cuts, LIMITS)

    def some_ids(self, length: int, start: int = 0) -> list[int]:
        """A run of the subject's text."""
        return [self.ids[(start + index) % len(self.ids)] for index in range(length)]


@pytest.fixture(
    scope="module",
    params=["llama", "gemma3", pytest.param("smollm2", marks=pytest.mark.model)],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "smollm2":
        loaded = request.getfixturevalue("default_model")
        folder = request.getfixturevalue("default_model_path")
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = tuple(loaded.tokenizer(TEXT).input_ids)
        cuts = CutTable.from_tokenizer(loaded.tokenizer)
        return Subject(loaded.runner, stock, cuts, ids, mixes=max(MIXES // 10, 1))
    build = tiny_llama if request.param == "llama" else tiny_gemma3
    model = build(seed=3)
    runner = TransformersRunner(model, observe_layout(build(seed=3)), context_tokens=2048)
    rng = random.Random(5)
    ids = tuple(rng.randrange(3, runner.vocab_size) for _ in range(400))
    newline = torch.zeros(runner.vocab_size, dtype=torch.uint8)
    newline[40:50] = 2
    return Subject(runner, build(seed=3), CutTable(newline.numpy()), ids, mixes=MIXES)


@dataclass
class Answer:
    """A sink that a test waits on."""

    events: list[EngineEvent] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.first.set()
        if event.finish is not None:
            self.done.set()

    def tokens(self) -> list[int]:
        assert self.done.wait(WAIT_S)
        return [token_id for event in self.events for token_id in event.token_ids]

    def stats(self) -> RequestStats:
        assert self.done.wait(WAIT_S)
        stats = self.events[-1].stats
        assert stats is not None
        return stats


class Service:
    """An engine on a subject, with names for its requests."""

    def __init__(self, subject: Subject, store: ChunkStore, **settings: int) -> None:
        self._names = 0
        self.engine = Engine(
            subject.runner,
            store,
            Speculator(CostTable(CostBuckets()), ControllerSettings(), SystemClock()),
            cuts=subject.cuts,
            limits=LIMITS,
            # Loads are forced: computing a tiny model's prompt is often the faster way. And none is
            # given up, nor a write under way, because the machine stands still for a while.
            settings=EngineSettings(
                price_loads=False,
                load_deadline_s=WAIT_S,
                settle_s=WAIT_S,
                **settings,  # type: ignore[arg-type]  # counts by name
            ),
            clock=SystemClock(),
            numeric_class="test",
        )
        self.engine.start(calibrate=False)

    def ask(
        self,
        prompt: ChunkedPrompt,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        speculation: SpeculationMode = "auto",
    ) -> Answer:
        self._names += 1
        answer = Answer()
        request = EngineRequest(
            f"r{self._names}", prompt, max_tokens, sampling, speculation=speculation
        )
        self.engine.submit(request, answer)
        return answer


Serve = Callable[..., Service]


@pytest.fixture
def serve(subject: Subject) -> Iterator[Serve]:
    """Starts services, and stops them after the test."""
    services: list[Service] = []

    def start(store: ChunkStore | None = None, **settings: int) -> Service:
        service = Service(subject, store or MemoryStore(1 << 28, SystemClock()), **settings)
        services.append(service)
        return service

    yield start
    for service in services:
        service.engine.stop()


def test_cold_and_fully_cached_prompts(subject: Subject, serve: Serve) -> None:
    service = serve()
    for number, length in enumerate([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1]):
        ids = subject.some_ids(length, start=11 * number)
        expected = subject.reference(ids, 8)

        cold = service.ask(subject.prompt(ids), 8)
        assert cold.tokens() == expected
        warm = service.ask(subject.prompt(ids), 8)

        assert warm.tokens() == expected
        assert cold.stats().cached_tokens == 0
        assert warm.stats().cached_tokens == length - 1


def test_interleaved_requests_that_share_a_prefix(subject: Subject, serve: Serve) -> None:
    service = serve(max_step_tokens=24, max_running=5)
    shared = subject.some_ids(70)
    prompts = [[*shared, *subject.some_ids(5 + 3 * n, start=100 + 7 * n)] for n in range(5)]

    answers = [service.ask(subject.prompt(ids), 8) for ids in prompts]

    assert [each.tokens() for each in answers] == [subject.reference(ids, 8) for ids in prompts]
    assert service.engine.stats().counters.shared_tokens > 0


def test_after_a_restart_from_disk(subject: Subject, serve: Serve, tmp_path: Path) -> None:
    ids = subject.some_ids(75)
    expected = subject.reference(ids, 8)
    disk = open_disk(tmp_path)
    before = serve(disk)
    assert before.ask(subject.prompt(ids), 8).tokens() == expected
    before.engine.stop()
    disk.close()

    disk = open_disk(tmp_path)
    after = serve(disk).ask(subject.prompt(ids), 8)

    assert after.tokens() == expected
    assert after.stats().disk_tokens == 74
    disk.close()


def test_half_of_the_chunks_deleted_under_load(subject: Subject, serve: Serve) -> None:
    store = MemoryStore(1 << 28, SystemClock())
    service = serve(store, max_step_tokens=40)
    texts = [subject.some_ids(100, start=37 * n) for n in range(3)]
    expected = [subject.reference(ids, 8) for ids in texts]
    for ids in texts:
        service.ask(subject.prompt(ids), 8).tokens()
    answers = [service.ask(subject.prompt(ids), 8) for ids in texts]
    for ids in texts:
        store.delete([chunk.prefix_key for chunk in subject.prompt(ids).chunks[::2]])
    answers += [service.ask(subject.prompt(ids), 8) for ids in texts]

    assert [answer.tokens() for answer in answers] == expected * 2


def test_seeded_sampling(subject: Subject, serve: Serve) -> None:
    service = serve()
    ids = subject.some_ids(50)
    settings = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=11),
        SamplingParams(temperature=1.0, top_k=40, seed=12, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, min_p=0.02, seed=13, frequency_penalty=0.5),
        SamplingParams(seed=14, presence_penalty=0.6, logit_bias={subject.ids[0]: -5.0}),
    ]
    expected = [subject.reference(ids, 8, params) for params in settings]

    together = [service.ask(subject.prompt(ids), 8, params) for params in settings]
    assert [answer.tokens() for answer in together] == expected
    cached = [service.ask(subject.prompt(ids), 8, params) for params in settings]

    assert [answer.tokens() for answer in cached] == expected
    assert all(answer.stats().cached_tokens > 0 for answer in cached)


def test_turns_of_a_chat(subject: Subject, serve: Serve) -> None:
    service = serve()
    history: list[list[int]] = [subject.some_ids(20)]
    for turn in range(3):
        history.append(subject.some_ids(9 + 6 * turn, start=60 * (turn + 1)))
        flat = [token_id for message in history for token_id in message]

        answer = service.ask(subject.prompt(*history), 6 + 14 * turn)

        assert answer.tokens() == subject.reference(flat, 6 + 14 * turn)
        if turn:
            # All of the last turn but its last token, whose KV was never needed.
            known = sum(len(message) for message in history[:-1]) - 1
            assert answer.stats().cached_tokens == known
        history.append(answer.tokens())


@pytest.mark.parametrize("part", range(PARTS))
def test_random_mixes_with_cancels_preemptions_and_a_faulty_store(
    subject: Subject, serve: Serve, part: int
) -> None:
    for seed in range(part, subject.mixes, PARTS):
        assert_mix_is_exact(subject, serve, random.Random(seed), random.Random(seed + 100))


def assert_mix_is_exact(
    subject: Subject, serve: Serve, rng: random.Random, faults: random.Random
) -> None:
    """Six requests at random moments, little memory, a store that fails every other call."""
    store = FaultyStore(
        MemoryStore(1 << 26, SystemClock()),
        lambda: faults.choice([Fault.NONE, Fault.NONE, *Fault]),
    )
    service = serve(
        store,
        kv_budget_bytes=5 * 64 * subject.runner.layout.bytes_per_token,
        kv_granule_tokens=16,
        growth_tokens=1,
        max_running=4,
        max_step_tokens=rng.choice([8, 32, 128]),
    )
    asked: list[tuple[Answer, list[int], SamplingParams, int]] = []
    for number in range(6):
        length = rng.choice([3, CHUNK - 1, CHUNK, CHUNK + 1, 50, 2 * CHUNK])
        ids = subject.some_ids(length, start=rng.choice([0, 0, 90]))
        params = SamplingParams(temperature=rng.choice([0.0, 0.8]), top_p=0.95, seed=number)
        tokens = rng.randrange(1, 20)
        mode = rng.choice(SPECULATION_MODES)
        answer = service.ask(subject.prompt(ids), tokens, params, speculation=mode)
        asked.append((answer, ids, params, tokens))
        if rng.random() < 0.4:
            asked[rng.randrange(len(asked))][0].first.wait(WAIT_S)
        if rng.random() < 0.2:
            service.engine.cancel(f"r{number + 1}")

    for answer, ids, params, tokens in asked:
        got = answer.tokens()
        expected = subject.reference(ids, tokens, params)
        cancelled = answer.events[-1].finish is FinishReason.CANCELLED
        assert got == (expected[: len(got)] if cancelled else expected)
    service.engine.stop()
    assert service.engine.stats().kv_leased_bytes == 0


def open_disk(folder: Path) -> LmdbStore:
    settings = ShardSettings(budget_bytes=64 << 20)
    return LmdbStore(ShardWriter(folder / "shard", settings, SystemClock()))
