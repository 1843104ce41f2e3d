"""Two hundred orders of one set of documents: what is stored stays, and goes on serving."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from rakv_cluster.chunking.ordering import cached_order
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.types import BlendWish, ReuseMode

ORDERS = 200
FRONT = [60, 61, 62, 63]
QUESTION = [59, 58]
DOCUMENTS = [[(7 * d + i * i + 3 * i) % 58 for i in range(9 + 4 * d)] for d in range(5)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 20, ManualClock())


@pytest.fixture
def engine(store: MemoryStore) -> EngineHarness:
    clock = ManualClock()
    engine = EngineHarness(
        FakeRunner(clock=clock),
        store,
        clock,
        settings=EngineSettings(price_loads=False),
        blending=BlendSupport(KeyRotation(torch.zeros(2, 1, dtype=torch.float64))),
    )
    engine.run(engine.ask(engine.prompt(FRONT, *DOCUMENTS, QUESTION), 2))
    return engine


def shuffles() -> list[list[list[int]]]:
    draw = random.Random(6)
    return [draw.sample(DOCUMENTS, len(DOCUMENTS)) for _ in range(ORDERS)]


def test_blended_orders_store_nothing_and_hit_alike_to_the_end(
    engine: EngineHarness, store: MemoryStore
) -> None:
    stored = store.stats().records
    reused = []
    for documents in shuffles():
        answer = engine.ask(
            engine.prompt(FRONT, *documents, QUESTION),
            2,
            reuse=ReuseMode.BLEND,
            blend=BlendWish(recompute=0.1),
        )
        engine.run(answer)
        stats = answer.stats
        reused.append((stats.cached_tokens + stats.repaired_tokens) / stats.prompt_tokens)

    total = len(FRONT) + sum(map(len, DOCUMENTS)) + len(QUESTION)
    known = (total - len(QUESTION)) / total
    assert min(reused) == pytest.approx(known)
    # An order that happens to be the stored one up to some document adds its exact prefix, no more.
    assert store.stats().records - stored <= 1


def test_reordered_requests_meet_in_one_order(engine: EngineHarness, store: MemoryStore) -> None:
    stored = store.stats().records
    for documents in shuffles():
        prompt = engine.prompt(FRONT, *documents, QUESTION)
        ends = list(accumulate(map(len, documents), initial=len(FRONT)))
        order = cached_order(prompt, list(pairwise(ends)), store.find)
        answer = engine.ask(engine.prompt(FRONT, *(documents[i] for i in order), QUESTION), 2)
        engine.run(answer)

        assert answer.stats.computed_tokens <= len(QUESTION)

    assert store.stats().records == stored


def test_exact_requests_in_other_orders_take_no_donor_away(
    engine: EngineHarness, store: MemoryStore
) -> None:
    """Variants are stored, each serves its order; what they stand in for stays a donor."""
    for documents in shuffles()[:40]:
        engine.run(engine.ask(engine.prompt(FRONT, *documents, QUESTION), 2))
    contents = [chunk.content_key for chunk in engine.prompt(FRONT, *DOCUMENTS, QUESTION).chunks]

    donors = store.donors(contents[1:])

    assert len(donors) == len(set(contents[1:]))
