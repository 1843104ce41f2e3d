"""One engine core, step by step, on a model without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.errors import ContextLengthExceeded, InvalidRequest
from rakv_cluster.model.step import Step
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness, Recording
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.types import FinishReason, ReuseMode, SamplingParams

SETTINGS = EngineSettings(
    kv_budget_bytes=1 << 20, max_step_tokens=16, max_running=4, growth_tokens=4
)


def ids(seed: int, count: int) -> list[int]:
    return [(seed * 31 + index * index * 7 + index) % 64 for index in range(count)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def runner(clock: ManualClock) -> FakeRunner:
    return FakeRunner(clock=clock)


@pytest.fixture
def plain(runner: FakeRunner, clock: ManualClock) -> EngineHarness:
    """An engine without a store."""
    return EngineHarness(runner, NullStore(), clock, settings=SETTINGS)


@pytest.fixture
def caching(runner: FakeRunner, clock: ManualClock) -> EngineHarness:
    """An engine with a store in memory."""
    return EngineHarness(runner, MemoryStore(1 << 24, clock), clock, settings=SETTINGS)


def test_one_request_gives_the_definition_s_tokens(
    runner: FakeRunner, plain: EngineHarness
) -> None:

    answer = plain.ask(plain.prompt(ids(1, 37)), 11)
    plain.run(answer)

    assert answer.token_ids == runner.generate(ids(1, 37), 11)
    assert answer.finish is FinishReason.LENGTH
    assert answer.stats.computed_tokens == 37
    assert answer.stats.output_tokens == 11


def test_an_identical_prompt_is_reused_to_its_last_but_one_token(caching: EngineHarness) -> None:
    first = caching.ask(caching.prompt(ids(1, 37)), 11)
    caching.run(first)

    second = caching.ask(caching.prompt(ids(1, 37)), 11)
    caching.run(second)

    assert second.token_ids == first.token_ids
    assert second.stats.ram_tokens == 36
    assert second.stats.computed_tokens == 1


@pytest.mark.parametrize("answer_tokens", [1, 5, 40])
def test_the_next_turn_reuses_the_answer(
    answer_tokens: int, runner: FakeRunner, caching: EngineHarness
) -> None:
    system, question = ids(1, 10), ids(2, 13)
    first = caching.ask(caching.prompt(system, question), answer_tokens)
    caching.run(first)
    history = [system, question, first.token_ids, ids(3, 6)]

    second = caching.ask(caching.prompt(*history), 5)
    caching.run(second)

    flat = [token_id for segment in history for token_id in segment]
    assert second.token_ids == runner.generate(flat, 5)
    # All of the first turn but its last token, whose KV was never needed.
    assert second.stats.ram_tokens == 10 + 13 + answer_tokens - 1


def test_chats_behind_one_system_prompt_keep_their_own_tails(
    runner: FakeRunner, caching: EngineHarness
) -> None:
    system = ids(1, 10)
    first, other = (caching.ask(caching.prompt(system, ids(n, 9)), 3) for n in (2, 3))
    caching.run(first, other)

    second = caching.ask(caching.prompt(system, ids(2, 9), first.token_ids, ids(4, 4)), 3)
    caching.run(second)

    assert second.stats.ram_tokens == 10 + 9 + 3 - 1


def test_a_short_prompt_repeated_is_reused_after_a_long_answer(caching: EngineHarness) -> None:
    caching.run(caching.ask(caching.prompt(ids(1, 3)), 30))

    again = caching.ask(caching.prompt(ids(1, 3)), 1)
    caching.run(again)

    assert again.stats.ram_tokens == 2


def test_reuse_off_neither_reads_nor_writes(caching: EngineHarness) -> None:
    caching.run(caching.ask(caching.prompt(ids(1, 37)), 4, reuse=ReuseMode.OFF))
    assert caching.core.stats().saved_records == 0

    caching.run(caching.ask(caching.prompt(ids(1, 37)), 4))
    off = caching.ask(caching.prompt(ids(1, 37)), 4, reuse=ReuseMode.OFF)
    caching.run(off)

    assert off.stats.cached_tokens == 0


def test_a_stop_token_ends_the_request_and_is_not_emitted(
    runner: FakeRunner, plain: EngineHarness
) -> None:
    expected = runner.generate(ids(1, 9), 20)
    stop = expected[6]
    assert stop not in expected[:6]

    answer = plain.ask(plain.prompt(ids(1, 9)), 20, stop_token_ids=frozenset({stop}))
    plain.run(answer)

    assert answer.token_ids == expected[:6]
    assert answer.finish is FinishReason.STOP
    assert answer.events[-1].stop_token_id == stop


class Refusing:
    """A grammar that lets everything through, and at the fourth token refuses what it let."""

    def __init__(self) -> None:
        self._accepted = 0

    def accept(self, token_id: int) -> None:
        self._accepted += 1
        if self._accepted == 4:
            raise ValueError("not what the grammar allows")

    def forbid(self, row: torch.Tensor, pending: Sequence[int]) -> None:
        """Nothing."""


def test_a_grammar_that_fails_ends_its_request_alone(
    runner: FakeRunner, plain: EngineHarness, clock: ManualClock
) -> None:
    failing = Recording(clock)
    sequence = plain.core.prepare(EngineRequest("r", plain.prompt(ids(1, 9)), 9), failing)
    sequence.rule.restrict(Refusing())
    plain.core.add(sequence)
    other = plain.ask(plain.prompt(ids(2, 9)), 9)

    plain.run(failing, other)

    assert failing.finish is FinishReason.ERROR
    assert failing.token_ids == runner.generate(ids(1, 9), 3)
    assert other.token_ids == runner.generate(ids(2, 9), 9)
    assert plain.core.healthy


def test_min_tokens_bans_stop_tokens_until_then(runner: FakeRunner, plain: EngineHarness) -> None:
    stop = runner.generate(ids(1, 9), 1)[0]

    answer = plain.ask(plain.prompt(ids(1, 9)), 20, stop_token_ids=frozenset({stop}), min_tokens=3)
    plain.run(answer)

    assert len(answer.token_ids) >= 3
    assert stop not in answer.token_ids


def test_forced_tokens_continue_an_answer(runner: FakeRunner, plain: EngineHarness) -> None:
    expected = runner.generate(ids(1, 9), 12)

    answer = plain.ask(plain.prompt(ids(1, 9)), 12, forced_ids=tuple(expected[:5]))
    plain.run(answer)

    assert answer.token_ids == expected[5:]


def test_forced_tokens_that_use_up_the_limit_end_at_once(plain: EngineHarness) -> None:

    answer = plain.ask(plain.prompt(ids(1, 9)), 2, forced_ids=(1, 2))

    assert answer.finish is FinishReason.LENGTH
    assert answer.token_ids == []


def test_cancel_frees_everything_before_the_next_step(plain: EngineHarness) -> None:
    answer = plain.ask(plain.prompt(ids(1, 30)), 12)
    plain.step()
    assert plain.core.stats().kv_leased_bytes > 0

    plain.core.cancel("request-1")

    assert answer.finish is FinishReason.CANCELLED
    assert plain.core.stats().kv_leased_bytes == 0
    assert not plain.step()


def test_a_deadline_ends_running_and_waiting_requests(plain: EngineHarness) -> None:
    answers = [plain.ask(plain.prompt(ids(n, 9)), 100, timeout_s=5.0) for n in range(6)]
    plain.step()

    plain.clock.advance(6.0)
    plain.step()

    assert {answer.finish for answer in answers} == {FinishReason.DEADLINE}
    assert plain.core.stats().kv_leased_bytes == 0


class ElsewhereRunner(FakeRunner):
    """Its logits are not in the host's memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


def test_penalties_and_bias_act_where_the_logits_are(clock: ManualClock) -> None:
    engine = EngineHarness(ElsewhereRunner(), NullStore(), clock, settings=SETTINGS)
    sampling = SamplingParams(
        presence_penalty=1.0, repetition_penalty=1.5, logit_bias={3: 1.0, 5: -1.0}
    )
    request = EngineRequest("r", engine.prompt(ids(1, 9)), 4, sampling, forced_ids=(7,))
    row = torch.empty(64, device="meta")

    engine.core.prepare(request, Recording(clock)).rule.adjust(row, pending=[1])

    assert row.device.type == "meta"


def test_preemption_does_not_change_the_output(runner: FakeRunner, clock: ManualClock) -> None:
    bytes_per_granule = 256 * runner.layout.bytes_per_token
    settings = EngineSettings(
        kv_budget_bytes=4 * bytes_per_granule, max_step_tokens=64, max_running=4, growth_tokens=1
    )
    engine = EngineHarness(runner, NullStore(), clock, settings=settings)

    answers = [engine.ask(engine.prompt(ids(n, 200)), 150) for n in range(4)]
    engine.run(*answers)

    assert engine.core.stats().counters.preemptions > 0
    for number, answer in enumerate(answers):
        assert answer.token_ids == runner.generate(ids(number, 200), 150)


def test_coming_back_from_preemption_is_not_accounted_as_reuse(
    runner: FakeRunner, clock: ManualClock
) -> None:
    settings = EngineSettings(
        kv_budget_bytes=2 * 256 * runner.layout.bytes_per_token, max_step_tokens=64, growth_tokens=1
    )
    engine = EngineHarness(runner, MemoryStore(1 << 24, clock), clock, settings=settings)

    answers = [engine.ask(engine.prompt(ids(n, 200)), 150) for n in range(2)]
    engine.run(*answers)

    assert engine.core.stats().counters.preemptions > 0
    assert [answer.stats.computed_tokens for answer in answers] == [200, 200]


def test_a_forward_that_fails_ends_only_the_request_it_fails_for(clock: ManualClock) -> None:
    poison = 63

    class Fragile(FakeRunner):
        def forward(self, step: Step) -> torch.Tensor:
            if poison in step.token_ids.tolist():
                raise RuntimeError("out of memory")
            return super().forward(step)

    runner = Fragile()
    engine = EngineHarness(runner, NullStore(), clock, settings=SETTINGS)
    good_ids = [token_id % 63 for token_id in ids(1, 9)]
    good = engine.ask(engine.prompt(good_ids), 3)
    bad = engine.ask(engine.prompt([1, 2, poison]), 3)
    engine.run(good, bad)

    assert bad.finish is FinishReason.ERROR
    assert "RuntimeError" in bad.events[-1].error
    assert good.finish is FinishReason.LENGTH
    assert engine.core.healthy


def test_an_engine_whose_forwards_all_fail_is_unhealthy(clock: ManualClock) -> None:
    class Broken(FakeRunner):
        def forward(self, step: Step) -> torch.Tensor:
            raise RuntimeError("device lost")

    engine = EngineHarness(Broken(), NullStore(), clock, settings=SETTINGS)

    for number in range(3):
        engine.run(engine.ask(engine.prompt(ids(number, 5)), 3))

    assert not engine.core.healthy


def test_a_sink_that_raises_ends_its_request_only(plain: EngineHarness) -> None:
    good = plain.ask(plain.prompt(ids(1, 9)), 8)
    bad = plain.ask(plain.prompt(ids(2, 9)), 8)
    plain.step()
    bad.close()

    plain.run(good)

    assert good.finish is FinishReason.LENGTH
    assert plain.core.stats().counters.sink_failures == 1
    assert plain.core.stats().running == 0


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"prompt_ids": []}, InvalidRequest, "prompt"),
        ({"prompt_ids": [1] * 1024}, ContextLengthExceeded, "prompt"),
        ({"prompt_ids": [1] * 1000, "max_tokens": 25}, ContextLengthExceeded, "max_tokens"),
        ({"prompt_ids": [1, 64]}, InvalidRequest, "prompt"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"min_tokens": -1}, InvalidRequest, "min_tokens"),
        ({"timeout_s": 0.0}, InvalidRequest, "timeout_s"),
        ({"forced_ids": (64,)}, InvalidRequest, "forced_ids"),
        ({"forced_ids": (1, 2, 3), "max_tokens": 2}, InvalidRequest, "forced_ids"),
    ],
)
def test_requests_that_cannot_run_are_refused_by_field(
    fields: dict[str, Any], error: type[InvalidRequest], field: str, plain: EngineHarness
) -> None:
    given = {"max_tokens": 4} | fields
    prompt = plain.prompt(given.pop("prompt_ids", [1, 2, 3]))

    with pytest.raises(error) as raised:
        plain.ask(prompt, **given)

    assert raised.value.field == field
