"""A request outlives its replica: nothing twice, nothing lost, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.chunking.keys import tail_key
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.errors import DeadlineExceeded, InvalidRequest, ReplicaLost, RequestRefused
from rakv_cluster.model.card import ModelCard
from rakv_cluster.serving.backend import Failover
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.testing import ManualClock
from rakv_cluster.types import ChunkedPrompt, FinishReason, SamplingParams

TEXT = tuple(range(100, 120))


def request_of(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = len(TEXT)) -> EngineRequest:
    chunked = ChunkedPrompt(bytes(32), prompt, (), 0, tail_key(bytes(32), bytes(32)))
    return EngineRequest(
        "r", chunked, max_tokens=max_tokens, sampling=SamplingParams(seed=5), timeout_s=60.0
    )


@dataclass
class DyingReplicas:
    """Replicas that say ``TEXT`` in steps and die after as many tokens as the plan's next entry.

    Past the plan's end they live. Every request they got is kept. The first of them blends
    ``first_blends`` tokens.
    """

    deaths: list[int]
    clock: ManualClock = field(default_factory=ManualClock)
    step_tokens: int = 1
    first_blends: int = 0
    delay_s: float = 0.0
    seen: list[EngineRequest] = field(default_factory=list)
    closed: int = 0

    async def describe(self) -> ModelCard:
        raise NotImplementedError

    async def stats(self) -> dict[str, Figures]:
        return {}

    async def forget(self, keys: Sequence[bytes]) -> None:
        raise NotImplementedError

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.seen.append(request)
        alive_for = self.deaths.pop(0) if self.deaths else len(TEXT) + 1
        text = TEXT[: request.max_tokens]
        said = len(request.forced_ids)
        spoken = 0
        try:
            while said < len(text):
                if spoken >= alive_for:
                    self.clock.advance(self.delay_s)
                    raise ReplicaLost("gone")
                step = text[said : said + self.step_tokens]
                said += len(step)
                spoken += len(step)
                end = FinishReason.LENGTH if said == len(text) and spoken < alive_for else None
                first = spoken == len(step)
                here = self.first_blends if len(self.seen) == 1 else 0
                stats = RequestStats(blended_tokens=here) if first or end else None
                yield EngineEvent(request.request_id, step, finish=end, stats=stats)
            raise ReplicaLost("gone before it could say that it had finished")
        finally:
            self.closed += 1


async def collect(failover: Failover, request: EngineRequest) -> list[int]:
    return [i async for event in failover.generate(request) for i in event.token_ids]


def failover_over(replicas: DyingReplicas) -> Failover:
    return Failover(replicas, replicas.clock, ServiceMetrics())


@given(death=st.integers(0, len(TEXT)), step_tokens=st.integers(1, 4))
async def test_a_death_anywhere_neither_loses_nor_doubles_a_token(
    death: int, step_tokens: int
) -> None:
    replicas = DyingReplicas([death], step_tokens=step_tokens)

    tokens = await collect(failover_over(replicas), request_of())

    assert tuple(tokens) == TEXT
    assert {request.sampling.seed for request in replicas.seen} == {5}
    assert replicas.closed == len(replicas.seen)


async def test_what_was_sent_is_forced_on_the_next_replica() -> None:
    replicas = DyingReplicas([3])

    await collect(failover_over(replicas), request_of())

    assert [request.forced_ids for request in replicas.seen] == [(), TEXT[:3]]


async def test_a_replica_that_was_out_of_reach_may_take_the_request_again() -> None:
    class StillAtIt(DyingReplicas):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
            if request.request_id in {each.request_id for each in self.seen}:
                raise InvalidRequest("the request id is in use", field="request_id")
            async for event in super().generate(request):
                yield event

    replicas = StillAtIt([3])

    assert tuple(await collect(failover_over(replicas), request_of())) == TEXT
    assert [request.request_id for request in replicas.seen] == ["r", "r-retry1"]


async def test_an_answer_that_was_complete_but_for_its_end_is_not_run_again() -> None:
    replicas = DyingReplicas([len(TEXT)])

    events = [event async for event in failover_over(replicas).generate(request_of())]

    assert events[-1].finish is FinishReason.LENGTH
    assert len(replicas.seen) == 1


@pytest.mark.parametrize("blended", [0, 7])
@pytest.mark.parametrize("death", [0, 3, len(TEXT)])
async def test_what_a_lost_replica_blended_stays_labelled(blended: int, death: int) -> None:
    replicas = DyingReplicas([death], first_blends=blended)

    events = [event async for event in failover_over(replicas).generate(request_of())]

    stats = events[-1].stats
    assert stats is not None
    assert stats.blended_tokens == 0
    assert stats.approximate == (blended > 0 and death > 0)


async def test_a_request_that_ended_two_replicas_is_refused_for_a_while() -> None:
    replicas = DyingReplicas([1, 1])
    failover = failover_over(replicas)

    with pytest.raises(RequestRefused):
        await collect(failover, request_of())
    with pytest.raises(RequestRefused):
        await collect(failover, request_of())
    assert len(replicas.seen) == 2
    other = await collect(failover, request_of(prompt=(7,)))
    replicas.clock.advance(61.0)
    later = await collect(failover, request_of())

    assert tuple(other) == tuple(later) == TEXT


async def test_the_time_of_a_dead_replica_counts() -> None:
    replicas = DyingReplicas([1], delay_s=45.0)
    await collect(failover_over(replicas), request_of())
    assert replicas.seen[1].timeout_s == pytest.approx(15.0)

    late = DyingReplicas([1], delay_s=61.0)
    with pytest.raises(DeadlineExceeded, match="while its replica was replaced"):
        await collect(failover_over(late), request_of())


@pytest.mark.parametrize("timeout_s", [1e-9, 0.0, -1.0])
async def test_time_that_ran_out_before_it_began_is_not_put_down_to_a_replica(
    timeout_s: float,
) -> None:
    replicas = DyingReplicas([])
    replicas.clock.advance(1e9)  # a nanosecond is nothing beside it

    with pytest.raises(DeadlineExceeded) as refusal:
        await collect(failover_over(replicas), replace(request_of(), timeout_s=timeout_s))

    assert refusal.value.message == "the request's time ran out"
    assert not replicas.seen


@dataclass
class FullReplicas(DyingReplicas):
    """Replicas that live, but have no memory to go on where the plan's replicas die; the death of
    number ``dies`` is one all the same."""

    dies: int = -1

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        number = len(self.seen)
        try:
            async for event in super().generate(request):
                yield event
        except ReplicaLost:
            if number == self.dies:
                raise
            stats = RequestStats(blended_tokens=self.first_blends)
            yield EngineEvent(
                request.request_id, (), finish=FinishReason.NO_MEMORY, stats=stats
            )  # fmt: skip


@pytest.mark.parametrize("had", [0, 3, len(TEXT) - 1])
async def test_without_memory_on_one_replica_a_request_goes_on_at_another(had: int) -> None:
    replicas = FullReplicas([had], first_blends=7)

    events = [event async for event in failover_over(replicas).generate(request_of())]

    assert tuple(i for event in events for i in event.token_ids) == TEXT
    assert [event.finish for event in events if event.finish] == [FinishReason.LENGTH]
    assert [request.forced_ids for request in replicas.seen] == [(), TEXT[:had]]
    stats = events[-1].stats
    assert stats is not None
    assert stats.approximate == (had > 0)


async def test_without_memory_anywhere_it_ends_so_and_may_come_again() -> None:
    replicas = FullReplicas([3, 3])
    failover = failover_over(replicas)

    events = [event async for event in failover.generate(request_of())]

    assert tuple(i for event in events for i in event.token_ids) == TEXT[:6]
    assert events[-1].finish is FinishReason.NO_MEMORY
    assert tuple(await collect(failover, request_of())) == TEXT


@pytest.mark.parametrize("dies", [0, 1])
async def test_one_death_and_one_lack_of_memory_do_not_make_a_request_dangerous(dies: int) -> None:
    replicas = FullReplicas([3, 3], dies=dies)
    failover = failover_over(replicas)

    with suppress(ReplicaLost):
        await collect(failover, request_of())

    assert len(replicas.seen) == 2
    assert tuple(await collect(failover, request_of())) == TEXT


@pytest.mark.parametrize("deaths", [0, 1])
async def test_no_one_waits_longer_for_a_replica_than_the_request_has_time(deaths: int) -> None:
    """There is none, or the one that died takes long to come back, or one hangs."""

    class Gone(DyingReplicas):
        waiting = 0

        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
            if len(self.seen) < deaths:
                async for event in super().generate(request):
                    yield event
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1

    replicas = Gone([3])
    failover = Failover(replicas, replicas.clock, ServiceMetrics(), grace_s=0.0)
    with pytest.raises(DeadlineExceeded):
        await collect(failover, replace(request_of(), timeout_s=0.05))
    assert replicas.waiting == 0


async def test_other_errors_are_not_retried() -> None:
    class Refusing(DyingReplicas):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
            self.seen.append(request)
            raise InvalidRequest("no")
            yield

    replicas = Refusing([])
    with pytest.raises(InvalidRequest):
        await collect(failover_over(replicas), request_of())
    assert len(replicas.seen) == 1


async def test_closing_the_stream_closes_the_replicas() -> None:
    replicas = DyingReplicas([])
    events = failover_over(replicas).generate(request_of())
    await anext(events)

    await events.aclose()

    assert replicas.closed == 1
