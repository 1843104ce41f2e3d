"""Donors before variants: what never was hit and is there for one beginning only leaves first."""

from __future__ import annotations

import itertools
import random
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.kv.codec import encode
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.donors import GOOD_CONTEXT_TOKENS
from rakv_cluster.store.eviction import POLICIES, Entry, Lru
from rakv_cluster.store.lmdb_shard import ShardSettings, ShardWriter
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.variants import BoundedVariants
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import tiny_record

BUDGET = 100
names = st.integers(0, 15).map(lambda number: b"%02d" % number)
contents = st.sampled_from([b"", b"x", b"y"])
events = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "use", "drop", "evict"]),
        names,
        st.integers(1, 30),
        contents,
        st.sampled_from([1, 200, 400]),
    ),
    max_size=60,
)


def entry(size: int, content: bytes, start: int = 1) -> Entry:
    return Entry(b"n", size, 8, start, 1.0, 0.0, 0.0, content=content)


def order(policy: BoundedVariants) -> list[bytes]:
    with closing(policy.coldest_first()) as keys:
        return list(keys)


@given(st.sampled_from(sorted(POLICIES)), events)
def test_every_key_once_and_unhit_variants_first_while_they_are_too_many(name, history):
    policy = BoundedVariants(POLICIES[name](BUDGET), BUDGET)
    held: dict[bytes, Entry] = {}
    for what, key, size, content, start in history:
        if what == "store" and key not in held:
            held[key] = entry(size, content, start)
            policy.insert(key, held[key])
        elif what == "use" and key in held:
            held[key].uses += 1
            policy.touch(key, held[key])
        elif what in ("drop", "evict") and key in held:
            policy.remove(key, held.pop(key), evicted=what == "evict")

    keys = order(policy)

    assert sorted(keys) == sorted(held)
    # By the definition: all unhit ones of a content but its donor, which may be the largest.
    groups = {c: [k for k in held if held[k].content == c] for c in (b"x", b"y")}
    sizes = [[held[k].size_bytes for k in group if not held[k].uses] for group in groups.values()]
    excess = sum(sum(each) - max(each, default=0) for each in sizes) - BUDGET / 2
    for key in keys:
        if excess <= 0:
            break
        assert not held[key].uses
        assert len(groups[held[key].content]) > 1
        excess -= held[key].size_bytes


def test_the_donor_is_the_first_and_then_the_first_with_enough_in_front() -> None:
    policy = BoundedVariants(Lru(BUDGET), budget_bytes=0)
    held = {b"a": entry(1, b"x", 5), b"b": entry(1, b"x", 9)}
    for key, each in held.items():
        policy.insert(key, each)
    assert order(policy) == [b"b", b"a"]

    held[b"c"] = entry(1, b"x", GOOD_CONTEXT_TOKENS)
    policy.insert(b"c", held[b"c"])
    assert order(policy) == [b"b", b"a", b"c"]

    policy.remove(b"c", held.pop(b"c"), evicted=True)
    assert order(policy)[0] == b"b"


def permutations(count: int) -> list[tuple[int, ...]]:
    """Documents in many orders, as a retriever gives them."""
    draw = random.Random(3)
    return [tuple(draw.sample(range(6), 6)) for _ in range(count)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_permutations_of_some_documents_do_not_crowd_out_the_others(name: str) -> None:
    catalog = Catalog(100, POLICIES[name])
    others = [b"other%d" % number for number in range(40)]
    for number, key in enumerate(others):
        catalog.add(key, entry(1, b"content%d" % number))
    for number, placed in enumerate(permutations(200)):
        for document in placed:
            key = b"%d/%d" % (number, document)
            for victim in catalog.victims({b"n": 1}):
                catalog.remove(victim, evicted=True)
            catalog.add(key, entry(1, b"document%d" % document))

    assert all(key in catalog for key in others)
    assert len(catalog) == 100


def placed_record(number: int, start: int) -> ChunkRecord:
    """A record of one and the same content behind other text each time."""
    record, content = tiny_record(number), tiny_record(0)
    return ChunkRecord(
        record.key, content.namespace, content.token_ids, start, content.layout, content.kv,
        1.0, "tiny", 0.0,
    )  # fmt: skip


def test_a_shard_knows_its_variants_after_a_restart(tmp_path) -> None:
    page = 4096
    limits = ShardSettings(40 * page)
    writer = ShardWriter(tmp_path, limits, ManualClock())
    donor, *variants = [placed_record(number, 10 + number) for number in range(1, 11)]
    for each in (donor, *variants):
        writer.commit([encode(each)])
    writer.close()

    writer = ShardWriter(tmp_path, limits, ManualClock())
    others = itertools.count(100)
    evicted: list[bytes] = []
    while len(evicted) < 3:
        evicted += writer.commit([encode(placed_record(next(others), 50))]).evicted
    writer.close()

    assert donor.key not in evicted
    assert set(evicted) <= {each.key for each in variants}


def test_memory_knows_variants_too() -> None:
    size = tiny_record(0).kv.nbytes
    store = MemoryStore(10 * size, ManualClock())
    others = [tiny_record(number) for number in range(100, 104)]
    store.put(others)
    store.put([placed_record(1, 10)])
    for number in range(2, 40):
        store.put([placed_record(number, 10)])

    kept = [*(other.key for other in others), placed_record(1, 10).key]
    assert set(store.find(kept)) == set(kept)
