"""Limits, ends from outside, and many at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from rakv_cluster.client import AsyncClient
from rakv_cluster.client.async_grpc import AsyncGrpcClient, AsyncGrpcStream
from rakv_cluster.errors import DeadlineExceeded, Overloaded, RateLimited
from rakv_cluster.testing.chats import LASTING
from rakv_cluster.testing.surfaces import Piece, Surface
from rakv_cluster.testing.waiting import eventually

from .conftest import MAX_RUNNING, MAX_WAITING, Cluster
from .test_generation import chat

pytestmark = pytest.mark.cluster


def view(surface: Surface, cluster: Cluster, tenant: str, views: ExitStack) -> Surface:
    """The same surface for the tenant that has this limit there."""
    made = cluster.surface(surface.name, f"{tenant}-{surface.name}")
    return views.enter_context(closing(made))


def test_requests_per_minute(surface: Surface, cluster: Cluster, views: ExitStack) -> None:
    few = view(surface, cluster, "few", views)
    few.ask(**chat(max_tokens=1))
    few.ask(**chat(max_tokens=1))

    with pytest.raises(RateLimited, match="requests per minute") as caught:
        few.ask(**chat(max_tokens=1))

    assert 0 < (caught.value.retry_after_s or 0) <= 30
    assert surface.ask(**chat(max_tokens=1)).text, "others are not affected"


def test_tokens_per_minute(surface: Surface, cluster: Cluster, views: ExitStack) -> None:
    wordy = view(surface, cluster, "wordy", views)
    wordy.ask(**chat())

    with pytest.raises(RateLimited, match="tokens per minute"):
        wordy.ask(**chat())


def test_requests_at_once(surface: Surface, cluster: Cluster, views: ExitStack) -> None:
    single = view(surface, cluster, "single", views)
    with single.stream(**chat(**LASTING, n=MAX_RUNNING)) as events:
        next(events)
        with pytest.raises(RateLimited, match="running"):
            single.ask(**chat(max_tokens=1))

    def free() -> bool:
        try:
            return bool(single.ask(**chat(max_tokens=1)).text)
        except RateLimited:
            return False

    eventually(free, "the place of the request that was left is free again")


def test_a_full_queue_refuses_and_says_when_to_come_back(
    surface: Surface, cluster: Cluster, views: ExitStack
) -> None:
    enough = threading.Event()
    refused: list[Overloaded] = []

    def ask_until_refused() -> None:
        with closing(cluster.surface(surface.name)) as own:
            while not enough.is_set():
                try:
                    with own.stream(**chat(max_tokens=1900)) as events:
                        for _ in events:
                            if enough.is_set():
                                return
                except Overloaded as error:
                    refused.append(error)
                    enough.set()

    count = MAX_RUNNING + MAX_WAITING + 4
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(ask_until_refused) for _ in range(count)]:
            done.result()

    assert (refused[0].retry_after_s or 0) > 0
    eventually(lambda: cluster.running() == 0.0, "the engine has nothing left to run")
    assert surface.ask(**chat(max_tokens=1)).text


def test_leaving_a_stream_ends_the_work(surface: Surface, cluster: Cluster) -> None:
    eventually(lambda: cluster.running() == 0.0, "nothing else runs")
    before = cluster.cancelled()
    with surface.stream(**chat(**LASTING)) as events:
        next(events)

    eventually(lambda: cluster.cancelled() > before, "the engine has ended the request")
    eventually(lambda: cluster.running() == 0.0, "the engine has nothing left to run")


def test_leaving_ends_the_work_of_all_choices(surface: Surface, cluster: Cluster) -> None:
    eventually(lambda: cluster.running() == 0.0, "nothing else runs")
    before = cluster.cancelled()
    with surface.stream(**chat(**LASTING, n=4)) as events:
        while next(events).index < 3:  # type: ignore[union-attr]  # a usage comes only at the end
            pass

    eventually(lambda: cluster.cancelled() >= before + 4, "the engine has ended all four")
    eventually(lambda: cluster.running() == 0.0, "the engine has nothing left to run")


def test_a_deadline_ends_the_work(surface: Surface, cluster: Cluster) -> None:
    with pytest.raises(DeadlineExceeded):
        surface.ask(**chat(**LASTING, n=MAX_RUNNING, timeout_s=0.5))

    eventually(lambda: cluster.running() == 0.0, "the engine has nothing left to run")


def test_a_deadline_ends_a_stream_with_an_error(surface: Surface, cluster: Cluster) -> None:
    pieces: list[Piece] = []
    with (
        pytest.raises(DeadlineExceeded),
        surface.stream(**chat(**LASTING, n=MAX_RUNNING, timeout_s=1.5)) as events,
    ):
        pieces += (event for event in events if isinstance(event, Piece))
    eventually(lambda: cluster.running() == 0.0, "the engine has nothing left to run")


def test_32_at_once_each_get_their_own_answer(surface: Surface) -> None:
    questions = [f"Question number {index}?" for index in range(32)]

    async def ask_all() -> list[str]:
        async with surface.client() as client:
            answers = await asyncio.gather(
                *(client.chat(q, temperature=0, max_tokens=16, ignore_eos=True) for q in questions)
            )
        return [answer.text for answer in answers]

    together = asyncio.run(ask_all())

    alone = [
        surface.ask(**chat(messages=[{"role": "user", "content": q}], max_tokens=16)).text
        for q in questions
    ]
    assert together == alone


def test_32_streams_at_once_do_not_mix(surface: Surface) -> None:
    questions = [f"Stream number {index}?" for index in range(32)]

    async def read(client: AsyncClient | AsyncGrpcClient, question: str) -> tuple[str, str]:
        stream = client.stream_chat(question, temperature=0, max_tokens=16, ignore_eos=True)
        async with stream if isinstance(stream, AsyncGrpcStream) else await stream as opened:
            pieces = [piece async for piece in opened]
            return "".join(pieces), (await opened.answer()).text

    async def read_all() -> list[tuple[str, str]]:
        async with surface.client() as client:
            return await asyncio.gather(*(read(client, question) for question in questions))

    for pieces, whole in asyncio.run(read_all()):
        assert pieces == whole != ""
