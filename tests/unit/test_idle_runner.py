"""Work that nobody waits for runs on the engine's model when no request is open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.idle import IdleRunner
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.errors import Unavailable
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.testing.engine import LIMITS, NAMESPACE, bare_engine, no_cuts
from rakv_cluster.testing.fake_runner import FakeRunner

DEADLINE_S = 20.0
IDS = [3, 5, 8, 13]


def step(runner: Runner) -> Step:
    buffer = KvBuffer(torch.zeros(runner.layout.shape(64), dtype=runner.layout.torch_dtype))
    positions = torch.arange(len(IDS))
    span = Span(buffer, 0, len(IDS), 0, len(IDS) - 1)
    return Step(torch.tensor(IDS), positions, (span,), positions)


class Held(FakeRunner):
    """Notes how many rows each step has; steps of a prompt wait until :attr:`go`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()
        self.rows: list[int] = []

    def forward(self, step: Step) -> torch.Tensor:
        self.rows.append(len(step.token_ids))
        if len(step.token_ids) != len(IDS):
            self.entered.set()
            assert self.go.wait(DEADLINE_S)
        return super().forward(step)


@pytest.fixture
def runner() -> Held:
    return Held()


@pytest.fixture
def engine(runner: Held) -> Iterator[Engine]:
    engine = bare_engine(runner)
    engine.start(calibrate=False)
    yield engine
    engine.stop(timeout_s=1.0)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_an_idle_engine_runs_it(engine: Engine, other: ThreadPoolExecutor) -> None:
    found = other.submit(engine.idle_runner.forward, step(engine.idle_runner))

    expected = FakeRunner()
    assert torch.equal(found.result(DEADLINE_S), expected.forward(step(expected)))


def test_a_request_goes_first(engine: Engine, runner: Held, other: ThreadPoolExecutor) -> None:
    done = threading.Event()

    def sink(event: EngineEvent) -> None:
        if event.finish is not None:
            done.set()

    prompt = chunk_prompt(NAMESPACE, [IDS * 3], no_cuts(64), LIMITS)
    engine.submit(EngineRequest("r", prompt, 4, speculation="off"), sink)
    assert runner.entered.wait(DEADLINE_S)
    found = other.submit(engine.idle_runner.forward, step(engine.idle_runner))
    runner.go.set()

    assert done.wait(DEADLINE_S)
    found.result(DEADLINE_S)
    # The prompt, three more tokens, and only then what nobody waits for.
    assert [rows == len(IDS) for rows in runner.rows] == [False] * (len(runner.rows) - 1) + [True]


def test_a_forward_that_fails_is_the_askers_alone(
    engine: Engine, other: ThreadPoolExecutor
) -> None:
    good = step(engine.idle_runner)
    bad = Step(good.token_ids, good.positions[:1], good.spans, good.logit_rows)
    failed = other.submit(engine.idle_runner.forward, bad)

    with pytest.raises(IndexError):
        failed.result(DEADLINE_S)
    other.submit(engine.idle_runner.forward, good).result(DEADLINE_S)
    assert engine.healthy()


def test_stopping_the_engine_releases_whoever_waits(other: ThreadPoolExecutor) -> None:
    woken = threading.Event()
    runner = FakeRunner()
    idle = IdleRunner(runner, woken.set)
    waiting = other.submit(idle.forward, step(runner))
    assert woken.wait(DEADLINE_S)

    idle.close()

    with pytest.raises(Unavailable):
        waiting.result(DEADLINE_S)
    with pytest.raises(Unavailable):
        idle.forward(step(runner))
    assert not idle.run_one()
