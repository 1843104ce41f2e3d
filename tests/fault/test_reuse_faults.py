"""A store that hangs, raises or lies costs time at most, and bounded time at that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import SystemClock
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.errors import InvalidRequest, Overloaded, Unavailable
from rakv_cluster.kv.buffer import BufferPool
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.model.step import Step
from rakv_cluster.reuse.assembly import load_plan
from rakv_cluster.reuse.planner import PlannedLoad, ReusePlan
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore, Found, Loaded, LoadItem
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import LIMITS, NAMESPACE, EngineHarness, no_cuts
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.faulty_store import Fault, FaultyStore
from rakv_cluster.testing.workers import InlineWorkers, ManualWorkers
from rakv_cluster.types import ChunkedPrompt, FinishReason, Tier

PROMPT = [(index * 5 + 1) % 64 for index in range(40)]
DEADLINE_S = 20.0
LONG_S = 60.0
"""A deadline that a test does not live to see, unless its clock skips it."""


class Gate(MemoryStore):
    """A store whose calls named in ``holds`` wait until :meth:`open`."""

    def __init__(self, holds: set[str]) -> None:
        super().__init__(1 << 24, SystemClock())
        self._holds = holds
        self._opened = threading.Event()
        self.entered = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def _pass(self, call: str) -> None:
        if call in self._holds:
            self.entered.set()
            assert self._opened.wait(DEADLINE_S)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        self._pass("find")
        return super().find(keys)

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        self._pass("load")
        return super().load(items)

    def put(self, records: Sequence[ChunkRecord]) -> int:
        self._pass("put")
        return super().put(records)


class SlowRunner(FakeRunner):
    """Takes long enough per step for another thread to get a word in."""

    def forward(self, step: Step) -> torch.Tensor:
        threading.Event().wait(0.002)
        return super().forward(step)


class HastyClock(SystemClock):
    """Real time and what :meth:`skip` adds: a deadline passes when a test says so, and not because
    the machine stands still for a second."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self._skipped_s


class BrittleClock(SystemClock):
    """A part of the engine that breaks once, wherever it is used next."""

    def __init__(self) -> None:
        self.fail_once = threading.Event()

    def monotonic_s(self) -> float:
        if self.fail_once.is_set():
            self.fail_once.clear()
            raise ZeroDivisionError("a bug")
        return super().monotonic_s()


class Answer:
    """A sink that another thread waits on."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.first = threading.Event()
        self.done = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.first.set()
        if event.finish is not None:
            self.done.set()

    def wait(self) -> list[int]:
        assert self.done.wait(DEADLINE_S)
        return [token_id for event in self.events for token_id in event.token_ids]

    @property
    def last(self) -> EngineEvent:
        return self.events[-1]


def prompt_of(ids: Sequence[int]) -> ChunkedPrompt:
    return chunk_prompt(NAMESPACE, [ids], no_cuts(64), LIMITS)


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines that load whatever is found, and stops them after the test."""
    engines: list[Engine] = []

    def build(
        store: ChunkStore,
        runner: FakeRunner,
        *,
        clock: SystemClock | None = None,
        **settings: float,
    ) -> Engine:
        engine = Engine(
            runner,
            store,
            Speculator(CostTable(CostBuckets()), ControllerSettings(), clock or SystemClock()),
            cuts=no_cuts(64),
            limits=LIMITS,
            settings=EngineSettings(price_loads=False, **settings),  # type: ignore[arg-type]  # ints and floats by name
            clock=clock or SystemClock(),
            numeric_class="fake",
        )
        engines.append(engine)
        engine.start()
        return engine

    yield build
    for engine in engines:
        engine.stop(timeout_s=1.0)


def pass_deadline(engine: Engine, clock: HastyClock) -> None:
    clock.skip(LONG_S)
    engine.cancel("nobody")  # wakes the loop


def ask(engine: Engine, name: str, ids: Sequence[int] = PROMPT, max_tokens: int = 5) -> Answer:
    answer = Answer()
    engine.submit(EngineRequest(name, prompt_of(ids), max_tokens), answer)
    return answer


@pytest.mark.parametrize("call", ["find", "load", "put"])
def test_a_store_that_hangs_costs_at_most_the_deadline(start: Start, call: str) -> None:
    store, clock = Gate({call}), HastyClock()
    engine = start(store, SlowRunner(), clock=clock, load_deadline_s=LONG_S)
    if call == "load":
        fill(store, PROMPT)

    answers = [ask(engine, f"r{number}") for number in range(3)]
    assert store.entered.wait(DEADLINE_S)
    pass_deadline(engine, clock)

    expected = FakeRunner().generate(PROMPT, 5)
    assert [answer.wait() for answer in answers] == [expected] * 3
    store.open()


def test_memory_that_an_abandoned_load_writes_to_is_not_used_again(start: Start) -> None:
    store, clock = Gate({"load"}), HastyClock()
    fill(store, PROMPT)
    engine = start(store, SlowRunner(), clock=clock, load_deadline_s=LONG_S)
    first = ask(engine, "first")
    assert store.entered.wait(DEADLINE_S)
    pass_deadline(engine, clock)
    assert first.wait() == FakeRunner().generate(PROMPT, 5)
    late = ask(engine, "late", list(reversed(PROMPT)), 60)
    assert late.first.wait(DEADLINE_S)

    store.open()

    assert late.wait() == FakeRunner().generate(list(reversed(PROMPT)), 60)
    assert engine.stats().counters.load_timeouts == 1


def test_the_next_request_waits_for_a_write_under_way(start: Start) -> None:
    store = Gate({"put"})
    engine = start(store, SlowRunner(), settle_s=DEADLINE_S, load_deadline_s=DEADLINE_S)
    ask(engine, "first").wait()
    assert store.entered.wait(DEADLINE_S)

    second = ask(engine, "second")
    assert not second.first.wait(0.2)
    store.open()

    assert second.wait() == FakeRunner().generate(PROMPT, 5)
    assert second.last.stats is not None
    assert second.last.stats.ram_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.FORGET, Fault.LIE])
def test_a_store_that_always_fails_is_no_store(fault: Fault) -> None:
    clock = ManualClock()
    runner = FakeRunner(clock=clock)
    healthy = MemoryStore(1 << 24, clock)
    fill(healthy, PROMPT)
    engine = EngineHarness(
        runner, FaultyStore(healthy, lambda: fault), clock, settings=EngineSettings()
    )

    answer = engine.ask(engine.prompt(PROMPT), 5)
    engine.run(answer)

    assert answer.token_ids == runner.generate(PROMPT, 5)
    assert answer.finish is FinishReason.LENGTH


def test_a_load_that_fails_half_way_keeps_its_first_half() -> None:
    clock = ManualClock()
    healthy = MemoryStore(1 << 24, clock)
    fill(healthy, PROMPT)
    faults = iter([Fault.NONE, Fault.LIE])  # of find and load
    store = FaultyStore(healthy, lambda: next(faults, Fault.NONE))
    engine = EngineHarness(FakeRunner(clock=clock), store, clock, settings=EngineSettings())

    answer = engine.ask(engine.prompt(PROMPT), 5)
    engine.run(answer)

    assert answer.token_ids == FakeRunner().generate(PROMPT, 5)
    assert answer.stats.ram_tokens == 16
    assert engine.core.stats().counters.load_failures == 3


def test_cancelling_before_a_load_begins_leaves_the_store_alone() -> None:
    clock = ManualClock()
    calls: list[Fault] = []
    store = FaultyStore(MemoryStore(1 << 24, clock), lambda: calls.append(Fault.NONE) or Fault.NONE)
    loaders = ManualWorkers()
    engine = EngineHarness(
        FakeRunner(clock=clock), store, clock, settings=EngineSettings(), loaders=loaders
    )
    answer = engine.ask(engine.prompt(PROMPT), 5)
    engine.step()
    assert loaders.queued

    engine.core.cancel("request-1")
    loaders.run_all()

    assert answer.finish is FinishReason.CANCELLED
    assert engine.core.stats().kv_leased_bytes == 0
    assert not calls


def test_memory_that_a_cancelled_request_s_load_writes_to_is_not_used_again(start: Start) -> None:
    store = Gate({"load"})
    fill(store, PROMPT)
    engine = start(store, SlowRunner())
    first = ask(engine, "first")
    assert store.entered.wait(DEADLINE_S)
    engine.cancel("first")
    first.wait()
    late = ask(engine, "late", list(reversed(PROMPT)), 60)
    assert late.first.wait(DEADLINE_S)

    store.open()

    assert late.wait() == FakeRunner().generate(list(reversed(PROMPT)), 60)


def test_a_failed_load_leaves_finite_numbers() -> None:
    """A masked attention may still read what is behind the verified slots: 0 times NaN is NaN."""
    clock = ManualClock()
    healthy = MemoryStore(1 << 24, clock)
    fill(healthy, PROMPT)
    layout = FakeRunner().layout
    buffer = BufferPool(layout, budget_bytes=1 << 20, device=torch.device("cpu")).lease(64)
    loads = tuple(
        PlannedLoad(chunk.prefix_key, chunk.start, chunk.token_ids, Tier.RAM, 1)
        for chunk in prompt_of(PROMPT).chunks
    )

    done = load_plan(ReusePlan(loads), FaultyStore(healthy, lambda: Fault.LIE), buffer, layout)

    assert done.tokens == 16
    assert done.failed == 3
    assert bool(buffer.data.isfinite().all())


def test_what_the_save_queue_cannot_hold_is_dropped_and_counted() -> None:
    clock = ManualClock()
    store = MemoryStore(1 << 24, clock)
    engine = EngineHarness(
        FakeRunner(clock=clock),
        store,
        clock,
        settings=EngineSettings(save_queue_bytes=0),
        savers=InlineWorkers(),
    )

    engine.run(engine.ask(engine.prompt(PROMPT), 5))

    assert engine.core.stats().dropped_records > 0
    assert store.stats().records == 0


def test_a_full_queue_refuses_with_a_time_to_come_back(start: Start) -> None:
    runner = SlowRunner()
    engine = start(NullStore(), runner, max_waiting=1, max_running=1)
    answers = [ask(engine, f"r{number}", max_tokens=900) for number in range(2)]

    with pytest.raises(Overloaded) as raised:
        ask(engine, "one too many")

    assert raised.value.retry_after_s is not None
    assert raised.value.retry_after_s >= 1.0
    for number, answer in enumerate(answers):
        engine.cancel(f"r{number}")
        answer.wait()
        assert answer.last.finish is FinishReason.CANCELLED
    assert ask(engine, "now", max_tokens=1).wait()


def test_a_request_id_in_use_is_refused(start: Start) -> None:
    engine = start(NullStore(), SlowRunner())
    ask(engine, "same", max_tokens=900)

    with pytest.raises(InvalidRequest) as raised:
        ask(engine, "same")

    assert raised.value.field == "request_id"


def test_stopping_ends_what_is_open_and_refuses_more(start: Start) -> None:
    engine = start(NullStore(), SlowRunner())
    answer = ask(engine, "open", max_tokens=900)
    assert answer.first.wait(DEADLINE_S)

    engine.stop()

    assert answer.done.is_set()
    assert answer.last.finish is FinishReason.CANCELLED
    assert not engine.healthy()
    with pytest.raises(Unavailable):
        ask(engine, "late")


def test_a_loop_that_breaks_ends_its_requests_and_says_so(start: Start) -> None:
    clock, store = BrittleClock(), Gate({"find"})
    engine = start(store, SlowRunner(), clock=clock, load_deadline_s=60.0)
    answer = ask(engine, "r")
    assert store.entered.wait(DEADLINE_S)

    clock.fail_once.set()
    engine.cancel("nobody")  # wakes the loop

    answer.wait()
    store.open()
    assert answer.last.finish is FinishReason.ERROR
    assert not engine.healthy()
    with pytest.raises(Unavailable):
        ask(engine, "late")


def fill(store: ChunkStore, ids: Sequence[int]) -> None:
    """Store the chunks of a prompt, as an engine that computed it would."""
    clock = ManualClock()
    runner = FakeRunner(clock=clock)
    sink: list[ChunkRecord] = []
    memory = MemoryStore(1 << 24, clock)
    engine = EngineHarness(runner, memory, clock, settings=EngineSettings())
    engine.run(engine.ask(engine.prompt(ids), 1))
    for chunk in engine.prompt(ids).chunks:
        kv = np.zeros(runner.layout.shape(len(chunk.token_ids)), dtype=np.uint32)
        item = LoadItem(chunk.prefix_key, chunk.token_ids, runner.layout, kv)
        assert memory.load([item])[0].ok
        sink.append(
            ChunkRecord(
                key=chunk.prefix_key,
                namespace=NAMESPACE,
                token_ids=chunk.token_ids,
                start=chunk.start,
                layout=runner.layout,
                kv=kv,
                cost_ms=1.0,
                numeric_class="fake",
                created_s=0.0,
            )
        )
    assert MemoryStore.put(store, sink) == len(sink)  # type: ignore[arg-type]  # past any gate
