"""A late request is sent twice, answered once, and nothing of the loser is left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from rakv_cluster.engine.request import EngineEvent
from rakv_cluster.errors import ReplicaLost
from rakv_cluster.serving.first_event import Events
from rakv_cluster.serving.hedging import HedgePolicy, hedged

AT_ONCE_S = 0.0


async def at_once() -> None:
    """A replica that answers."""


async def never() -> None:
    """A replica that hangs."""
    await asyncio.Event().wait()


async def lost() -> None:
    """A replica that dies."""
    raise ReplicaLost("gone")


async def lost_after(event: asyncio.Event) -> None:
    await event.wait()
    await lost()


@dataclass
class Replicas:
    """Two, each of which waits for its ``plan`` and then says its own tokens."""

    plans: Sequence[Callable[[], Awaitable[None]]]
    open: int = 0
    calls: int = 0
    won: list[bool] = field(default_factory=list)

    async def call(self, number: int) -> AsyncGenerator[EngineEvent, None]:
        self.calls += 1
        self.open += 1
        try:
            await self.plans[number]()
            for token in range(3):
                yield EngineEvent("r", (10 * number + token,))
        finally:
            self.open -= 1

    def race(self, after_s: float = AT_ONCE_S) -> Events:
        return hedged(self.call(0), after_s, lambda: [self.call(1)], self.won.append)


async def tokens(events: Events) -> list[int]:
    return [token async for event in events for token in event.token_ids]


def test_who_answers_in_time_is_not_hedged() -> None:
    replicas = Replicas([at_once, at_once])
    assert asyncio.run(tokens(replicas.race(60.0))) == [0, 1, 2]
    assert (replicas.calls, replicas.open, replicas.won) == (1, 0, [])


def test_the_second_answers_for_one_that_hangs() -> None:
    replicas = Replicas([never, at_once])
    assert asyncio.run(tokens(replicas.race())) == [10, 11, 12]
    assert (replicas.calls, replicas.open, replicas.won) == (2, 0, [True])


def test_a_first_that_wakes_up_in_time_is_read_alone() -> None:
    async def run() -> list[int]:
        awake = asyncio.Event()

        async def second() -> None:
            awake.set()
            await never()

        replicas.plans = [awake.wait, second]
        return await tokens(replicas.race())

    replicas = Replicas([])
    assert asyncio.run(run()) == [0, 1, 2]
    assert (replicas.calls, replicas.open, replicas.won) == (2, 0, [False])


def test_both_at_once_give_one_answer() -> None:
    async def run() -> list[int]:
        go = asyncio.Event()

        async def second() -> None:
            go.set()

        replicas.plans = [go.wait, second]
        return await tokens(replicas.race())

    replicas = Replicas([])
    assert asyncio.run(run()) in ([0, 1, 2], [10, 11, 12])
    assert replicas.open == 0


def test_one_that_dies_is_out_of_the_race() -> None:
    async def run() -> list[int]:
        go = asyncio.Event()

        async def second() -> None:
            go.set()
            for _ in range(9):
                await asyncio.sleep(0)

        replicas.plans = [partial(lost_after, go), second]
        return await tokens(replicas.race())

    replicas = Replicas([])
    assert asyncio.run(run()) == [10, 11, 12]
    assert (replicas.calls, replicas.open, replicas.won) == (2, 0, [True])


def test_nobody_wins_a_race_that_both_die_in() -> None:
    async def run() -> None:
        go = asyncio.Event()

        async def second() -> None:
            go.set()
            await lost()

        replicas.plans = [partial(lost_after, go), second]
        with pytest.raises(ReplicaLost):
            await tokens(replicas.race())

    replicas = Replicas([])
    asyncio.run(run())
    assert (replicas.calls, replicas.open, replicas.won) == (2, 0, [])


@pytest.mark.parametrize("plans", [[lost, at_once], [lost, lost]])
def test_a_death_before_the_hedge_is_failovers_business(
    plans: Sequence[Callable[[], Awaitable[None]]],
) -> None:
    replicas = Replicas(plans)
    with pytest.raises(ReplicaLost):
        asyncio.run(tokens(replicas.race(60.0)))
    assert (replicas.calls, replicas.open) == (1, 0)


def test_who_leaves_closes_both() -> None:
    async def run() -> None:
        both = asyncio.Event()

        async def second() -> None:
            both.set()
            await never()

        replicas.plans = [never, second]
        race = replicas.race()
        reading = asyncio.ensure_future(anext(race))
        await both.wait()
        reading.cancel()
        await asyncio.wait([reading])
        await race.aclose()

    replicas = Replicas([])
    asyncio.run(run())
    assert (replicas.calls, replicas.open) == (2, 0)


def test_the_slowest_twentieth_is_late_once_enough_is_known() -> None:
    policy = HedgePolicy(0.05)
    for number in range(31):
        policy.observe(float(number))
    assert policy.after_s() == math.inf
    for number in range(31, 101):
        policy.observe(float(number))
    assert policy.after_s() == pytest.approx(95.0)


def test_no_more_than_its_share_is_hedged_however_late_all_are() -> None:
    policy = HedgePolicy(0.05)
    for _ in range(1000):
        policy.after_s()
        policy.observe(1.0)
    assert sum(policy.take() for _ in range(100)) == 5
    hedges = 0
    for _ in range(1000):
        policy.after_s()
        hedges += policy.take()
    assert 45 <= hedges <= 50


def test_without_a_share_nothing_is_hedged() -> None:
    policy = HedgePolicy(0.0)
    for _ in range(100):
        policy.observe(1.0)
        assert policy.after_s() == math.inf
    assert not policy.take()
