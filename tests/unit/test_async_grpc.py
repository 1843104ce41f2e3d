"""The gRPC client for asyncio: it answers as the other one does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from rakv_cluster.client import Document
from rakv_cluster.client.async_grpc import AsyncGrpcClient
from rakv_cluster.client.grpc import GrpcClient
from rakv_cluster.client.retries import NO_RETRIES, RetryPolicy
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.grpc_server import grpc_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards
from rakv_cluster.testing.waiting import eventually

DOCUMENTS = [Document("Line of a document.\n\n" * 40, "d")]


def answer(prompt: str) -> str:
    if "be overloaded" in prompt:
        raise Overloaded("full", retry_after_s=2.5)
    return "Grüße, 世界 🌍"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(answer)


@pytest.fixture
def target(backend: ScriptedBackend) -> Iterator[str]:
    shards = SimulatedShards(["n0"], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, lambda: ["n0"], ManualClock())
    with grpc_server(lambda: scripted_service(backend, Settings(), ManualClock()), admin) as target:
        yield target


async def test_it_answers_as_the_other_client_does(target: str) -> None:
    with GrpcClient(target, retries=NO_RETRIES) as plain:
        expected = await asyncio.to_thread(plain.chat, "q", documents=DOCUMENTS, seed=1)
        route = await asyncio.to_thread(plain.explain_route, "q")
    async with AsyncGrpcClient(target, retries=NO_RETRIES) as client:
        got = await client.chat("q", documents=DOCUMENTS, seed=1)
        completed = await client.complete("go on")
        async with client.stream_chat("q", documents=DOCUMENTS) as stream:
            pieces = [piece async for piece in stream]
            streamed = await stream.answer()
        assert await client.explain_route("q") == route

    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    assert got.prompt_tokens == expected.prompt_tokens
    assert got.cached_tokens > 0
    assert completed.text == "".join(pieces) == streamed.text == expected.text
    assert route.chosen == "only"
    assert [line.replica for line in route.replicas] == ["only"]


async def test_operations_on_the_cache(target: str) -> None:
    async with AsyncGrpcClient(target, retries=NO_RETRIES) as client:
        warmed = await client.warm("q", documents=DOCUMENTS)
        found = await client.lookup("q", documents=DOCUMENTS)
        pinned = await client.pin("q", documents=DOCUMENTS, owner="me", ttl_s=5)
        ended = await client.unpin("q", documents=DOCUMENTS, owner="me")
        removed = await client.evict("q", documents=DOCUMENTS)
        stats = await client.stats()

    assert warmed.usage.prompt_tokens == found.prompt_tokens
    assert (found.stored_tokens, pinned.pinned_chunks) == (0, 0)
    assert (ended.ended_pins, removed.removed_records) == (0, 0)
    assert set(stats.shards_by_node) == {"n0"}


async def test_statuses_are_errors_of_our_tree(target: str) -> None:
    async with AsyncGrpcClient(target, retries=NO_RETRIES) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.chat("q", temperature=9)
        with pytest.raises(Overloaded) as refused:
            await client.chat("be overloaded")

    assert caught.value.field == "temperature"
    assert refused.value.retry_after_s == 2.5


async def test_no_server_is_tried_again_and_then_unavailable() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    retries = RetryPolicy(attempts=3)
    async with AsyncGrpcClient("127.0.0.1:1", retries=retries, sleep=sleep) as client:
        with pytest.raises(Unavailable):
            await client.chat("q")

    assert len(waits) == 2


async def test_a_deadline_and_leaving_a_stream_end_the_work(
    target: str, backend: ScriptedBackend
) -> None:
    backend.hold()
    async with AsyncGrpcClient(target, timeout_s=1.0, retries=NO_RETRIES) as client:
        with pytest.raises(DeadlineExceeded):
            await client.chat("q")
    async with AsyncGrpcClient(target, retries=NO_RETRIES) as client:
        async with client.stream_chat("q") as stream:
            assert await anext(stream)
        await asyncio.to_thread(
            eventually,
            # The first may never have begun, on a machine that stands still for its second.
            lambda: len(backend.cancelled) == len(backend.requests),
            "the engine's work has ended",
        )
    assert backend.requests
