"""Whatever is mixed, each request gets the tokens it would get alone, and nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.probing import ProbeSettings
from rakv_cluster.speculation.speculator import SPECULATION_MODES, SpeculationMode
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import LIMITS, EngineHarness, Recording
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.faulty_store import Fault, FaultyStore
from rakv_cluster.testing.workers import ManualWorkers
from rakv_cluster.types import BlendWish, ChunkedPrompt, FinishReason, ReuseMode, SamplingParams

CHUNK = LIMITS.max_tokens
GRANULE = 8
# Lengths where off-by-one errors live, and some others.
LENGTHS = sorted({n * CHUNK + d for n in (0, 1, 2, 4) for d in (-1, 0, 1)} - {-1, 0})


@dataclass(frozen=True)
class Ask:
    """A request of the mix: the first ``length`` tokens of one of a few shared texts, and more."""

    front: int
    text: int
    length: int
    own_suffix: int
    max_tokens: int
    temperature: float
    seed: int
    reuse: ReuseMode
    recompute: float
    tenant: str
    speculation: SpeculationMode
    background: bool

    @property
    def segments(self) -> list[list[int]]:
        shared = [(self.text * 17 + index * index + 3 * index) % 64 for index in range(self.length)]
        own = [(self.seed + index) % 64 for index in range(self.own_suffix)]
        front = [(self.front + index) % 64 for index in range(self.front)]
        return [segment for segment in (front, shared, own) if segment]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)


asks = st.builds(
    Ask,
    front=st.sampled_from([0, 0, 3, CHUNK + 1]),
    text=st.integers(0, 1),
    length=st.sampled_from(LENGTHS),
    own_suffix=st.sampled_from([0, 0, 1, 5, CHUNK]),
    max_tokens=st.integers(1, 3 * CHUNK),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    reuse=st.sampled_from(
        [*[ReuseMode.EXACT] * 3, ReuseMode.BLEND, ReuseMode.BLEND, ReuseMode.OFF]
    ),
    recompute=st.sampled_from([0.0, 0.3, 1.0]),
    tenant=st.sampled_from(["a", "b"]),
    speculation=st.sampled_from(SPECULATION_MODES),
    background=st.sampled_from([False, False, True]),
)
actions = st.lists(
    st.sampled_from(["arrive"] * 3 + ["step"] * 6 + ["load", "save", "cancel", "delete", "hang"]),
    min_size=4,
    max_size=60,
)
engine_settings = st.builds(
    EngineSettings,
    kv_budget_bytes=st.integers(12, 24).map(lambda granules: granules * GRANULE * 32),
    kv_granule_tokens=st.just(GRANULE),
    max_running=st.integers(1, 4),
    max_step_tokens=st.sampled_from([4, 7, 16, 64]),
    min_prefill_tokens=st.integers(1, 4),
    growth_tokens=st.sampled_from([1, GRANULE]),
    join_s=st.sampled_from([0.02, 30.0]),
    load_deadline_s=st.just(1.0),
    background_step_tokens=st.sampled_from([1, 16]),
    background_s=st.sampled_from([0.02, 60.0]),
)


def alone(ask: Ask) -> list[int]:
    """Greedy: by the definition. Sampled: in an engine of its own, without a store."""
    clock = ManualClock()
    runner = FakeRunner(clock=clock)
    if not ask.temperature:
        flat = [token_id for segment in ask.segments for token_id in segment]
        return runner.generate(flat, ask.max_tokens)
    engine = EngineHarness(runner, NullStore(), clock, settings=EngineSettings())
    answer = engine.ask(engine.prompt(*ask.segments), ask.max_tokens, sampling=ask.sampling)
    engine.run(answer)
    return answer.token_ids


@dataclass
class Mix:
    """A running mix and what was asked of it."""

    engine: EngineHarness
    store: MemoryStore
    loaders: ManualWorkers
    savers: ManualWorkers
    answers: list[tuple[Ask, Recording]]
    prompts: list[ChunkedPrompt]

    def act(self, action: str, queue: list[Ask]) -> None:
        if action == "arrive" and queue:
            ask = queue.pop()
            prompt = self.engine.prompt(*ask.segments)
            self.prompts.append(prompt)
            recording = self.engine.ask(
                prompt,
                ask.max_tokens,
                sampling=ask.sampling,
                reuse=ask.reuse,
                blend=BlendWish(recompute=ask.recompute),
                tenant=ask.tenant,
                speculation=ask.speculation,
                background=ask.background,
            )
            self.answers.append((ask, recording))
        elif action == "step":
            self.engine.step()
        elif action == "load" and self.loaders.queued:
            self.loaders.run_one()
        elif action == "save" and self.savers.queued:
            self.savers.run_one()
        elif action == "cancel" and self.answers:
            self.engine.core.cancel(f"request-{len(self.answers)}")
            self.engine.core.check_invariants()
        elif action == "delete":
            keys = [chunk.prefix_key for prompt in self.prompts for chunk in prompt.chunks]
            self.store.delete(keys[::2])
        elif action == "hang":
            self.engine.clock.advance(1.1)

    def finish(self) -> None:
        for _ in range(3000):
            if all(recording.finish is not None for _, recording in self.answers):
                return
            self.engine.step()
            self.loaders.run_all()
            self.savers.run_all()
        raise AssertionError("requests did not finish")


def build(config: EngineSettings, draw_fault: st.DataObject | None = None) -> Mix:
    clock = ManualClock()
    memory = MemoryStore(1 << 20, clock)
    store: ChunkStore = memory
    if draw_fault is not None:
        faults = st.sampled_from([Fault.NONE, *Fault])
        store = FaultyStore(memory, lambda: draw_fault.draw(faults))
    loaders, savers = ManualWorkers(), ManualWorkers()
    engine = EngineHarness(
        FakeRunner(clock=clock),
        store,
        clock,
        settings=config,
        loaders=loaders,
        savers=savers,
        # The fake's keys have no positions; it attends to nothing, so probes choose first tokens.
        blending=BlendSupport(
            KeyRotation(torch.zeros(2, 1, dtype=torch.float64)),
            probe=ProbeSettings((0, 1), most_share=1.0),
        ),
    )
    return Mix(engine, memory, loaders, savers, [], [])


def check_answers(mix: Mix) -> None:
    for ask, recording in mix.answers:
        stats = recording.stats
        assert stats.cached_tokens + stats.computed_tokens == stats.prompt_tokens
        if ask.reuse is ReuseMode.OFF:
            assert stats.cached_tokens == 0
        if stats.approximate:
            assert ask.reuse is ReuseMode.BLEND
        if stats.blended_tokens:
            assert ask.recompute < 1
            continue
        expected = alone(ask)
        if recording.finish is FinishReason.CANCELLED:
            assert recording.token_ids == expected[: len(recording.token_ids)]
        else:
            assert recording.finish is FinishReason.LENGTH
            assert recording.token_ids == expected
    assert mix.engine.core.stats().kv_leased_bytes == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine_settings, st.lists(asks, min_size=1, max_size=7), actions)
def test_a_mix_gives_each_request_its_own_tokens(
    config: EngineSettings, queue: list[Ask], script: list[str]
) -> None:
    mix = build(config)

    for action in script:
        mix.act(action, queue)
    while queue:
        mix.act("arrive", queue)
    mix.finish()

    check_answers(mix)
    totals = mix.engine.core.stats().counters
    event(f"blended: {any(r.stats.blended_tokens for _, r in mix.answers)}")
    event(f"wholly repaired: {any(r.stats.repaired_tokens for _, r in mix.answers)}")
    event(f"drafted: {any(r.stats.accepted_tokens for _, r in mix.answers)}")
    event(f"preempted: {totals.preemptions > 0}")
    event(f"shared: {totals.shared_tokens > 0}")
    event(f"reused: {totals.ram_tokens > 0}")
    event(f"load timeouts: {totals.load_timeouts > 0}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine_settings, st.lists(asks, min_size=1, max_size=6), actions, st.data())
def test_a_faulty_store_changes_no_token(
    config: EngineSettings, queue: list[Ask], script: list[str], data: st.DataObject
) -> None:
    mix = build(config, data)

    for action in script:
        mix.act(action, queue)
    while queue:
        mix.act("arrive", queue)
    mix.finish()

    check_answers(mix)
