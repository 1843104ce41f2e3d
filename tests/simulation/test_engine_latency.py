"""Latency of streams and prompts that share an engine, in virtual time.

The fake model takes 30 ms a step and 1.5 ms a row, about what SmolLM2 takes on two cores.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness, Recording
from rakv_cluster.testing.fake_runner import FakeRunner

LONG, SHORT = 4000, 60
STEP_MS, ROW_MS = 30.0, 1.5


def gaps_s(answer: Recording) -> list[float]:
    return [later - earlier for earlier, later in pairwise(answer.times_s)]


class Latencies:
    """A calibrated engine and timed requests on it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        runner = FakeRunner(clock=self.clock, context_tokens=8192, step_ms=STEP_MS, row_ms=ROW_MS)
        self.engine = EngineHarness(runner, NullStore(), self.clock, settings=EngineSettings())
        self.engine.core.calibrate()
        self._names = 0

    def ask(self, prompt_tokens: int, max_tokens: int, tenant: str = "") -> Recording:
        self._names += 1
        ids = [(self._names * 7 + index * index) % 64 for index in range(prompt_tokens)]
        prompt = self.engine.prompt(ids)
        return self.engine.ask(prompt, max_tokens, tenant=tenant, speculation="off")

    def first_token_s(self, answer: Recording) -> float:
        """Run until its first token; seconds from now to then."""
        began_s = self.clock.monotonic_s()
        self.until(answer, 1)
        return answer.times_s[0] - began_s

    def until(self, answer: Recording, tokens: int) -> None:
        while len(answer.token_ids) < tokens:
            self.engine.step()


def test_a_long_prompt_neither_stalls_a_stream_nor_starves() -> None:
    alone = Latencies()
    alone_s = alone.first_token_s(alone.ask(LONG, 1))
    shared = Latencies()
    stream = shared.ask(SHORT, 400)
    shared.until(stream, 20)
    before_s = statistics.median(gaps_s(stream))
    began = len(stream.times_s)

    shared_s = shared.first_token_s(shared.ask(LONG, 1))

    assert max(gaps_s(stream)[began - 1 :]) <= 4.0 * before_s
    assert shared_s <= 1.8 * alone_s


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    latencies = Latencies()
    long_prompt = latencies.ask(LONG, 1)
    latencies.engine.step()

    short_s = latencies.first_token_s(latencies.ask(SHORT, 1))

    assert not long_prompt.token_ids
    assert short_s <= 1.01 * (STEP_MS + ROW_MS * EngineSettings().max_step_tokens) / 1e3


def test_a_tenant_with_one_request_is_not_behind_another_s_queue() -> None:
    latencies = Latencies()
    crowd = [latencies.ask(200, 10, tenant="crowd") for _ in range(30)]
    for _ in range(5):
        latencies.engine.step()
    finished_before = sum(each.finish is not None for each in crowd)

    latencies.until(latencies.ask(SHORT, 1, tenant="single"), 1)

    finished = sum(each.finish is not None for each in crowd)
    assert finished - finished_before <= EngineSettings().max_running
