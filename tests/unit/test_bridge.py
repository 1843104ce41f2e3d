"""Events cross from an engine's thread to a coroutine, in order and bounded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rakv_cluster.engine.request import EngineEvent, RequestStats
from rakv_cluster.serving.bridge import EventBridge, merged
from rakv_cluster.types import FinishReason, TokenLogprob


async def test_events_of_another_thread_arrive_in_order() -> None:
    bridge = EventBridge(asyncio.get_running_loop())

    def engine() -> None:
        for token_id in range(500):
            bridge(EngineEvent("r", (token_id,)))
        bridge(EngineEvent("r", (), finish=FinishReason.LENGTH))

    thread = threading.Thread(target=engine)
    thread.start()
    events = [event async for event in bridge.events()]
    thread.join()

    assert [i for event in events for i in event.token_ids] == list(range(500))
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish is FinishReason.LENGTH


async def test_what_a_slow_reader_has_not_taken_comes_as_one_event() -> None:
    bridge = EventBridge(asyncio.get_running_loop())
    for token_id in range(5):
        bridge(EngineEvent("r", (token_id,)))
    bridge(EngineEvent("r", (), finish=FinishReason.STOP, stop_token_id=9))

    events = [event async for event in bridge.events()]

    assert events == [EngineEvent("r", (0, 1, 2, 3, 4), finish=FinishReason.STOP, stop_token_id=9)]


@pytest.mark.parametrize("read", [True, False])
async def test_an_end_is_heard_of_whether_or_not_anybody_reads(read: bool) -> None:
    ends: list[EngineEvent] = []
    bridge = EventBridge(asyncio.get_running_loop(), ends.append)
    last = EngineEvent("r", (2,), finish=FinishReason.CANCELLED)

    def engine() -> None:
        bridge(EngineEvent("r", (1,)))
        bridge(last)

    await asyncio.to_thread(engine)
    if read:
        async for event in bridge.events():
            assert not event.finish or ends
    await asyncio.sleep(0)

    assert ends == [last]


def test_merging_keeps_the_latest_account_and_every_log_probability() -> None:
    first, last = RequestStats(prompt_tokens=1), RequestStats(prompt_tokens=2)
    one, two = TokenLogprob(1, -0.1), TokenLogprob(2, -0.2)

    event = merged(
        [
            EngineEvent("r", (1,), (one,), stats=first),
            EngineEvent("r", (2,), (two,), stats=last),
            EngineEvent("r", (), finish=FinishReason.ERROR, error="broke"),
        ]
    )

    assert event.token_ids == (1, 2)
    assert event.logprobs == (one, two)
    assert event.stats == last
    assert (event.finish, event.error) == (FinishReason.ERROR, "broke")
