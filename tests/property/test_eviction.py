"""Policies and the catalog: orders are complete and stable, room is made, nothing spared leaves."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.eviction import POLICIES, Arc, Entry, Gdsf, Lru, S3Fifo

BUDGET = 100
names = st.integers(0, 15).map(lambda number: b"%02d" % number)
events = st.lists(
    st.tuples(st.sampled_from(["store", "use", "drop", "evict"]), names, st.integers(1, 30)),
    max_size=60,
)
factories = st.sampled_from(sorted(POLICIES))


def entry(size: int = 1, *, namespace: bytes = b"n", start: int = 0, cost_ms: float = 1.0) -> Entry:
    return Entry(namespace, size, 8, start, cost_ms, 0.0, 0.0)


def order(policy) -> list[bytes]:
    with closing(policy.coldest_first()) as keys:
        return list(keys)


def replay(policy, history) -> dict[bytes, Entry]:
    held: dict[bytes, Entry] = {}
    for what, key, size in history:
        if what == "store" and key not in held:
            held[key] = entry(size)
            policy.insert(key, held[key])
        elif what == "use" and key in held:
            held[key].uses += 1
            policy.touch(key, held[key])
        elif what in ("drop", "evict") and key in held:
            policy.remove(key, held.pop(key), evicted=what == "evict")
    return held


@given(factories, events)
def test_the_order_holds_every_key_once(name, history):
    policy = POLICIES[name](BUDGET)

    held = replay(policy, history)

    assert sorted(order(policy)) == sorted(held)


@given(factories, events, st.integers(0, 10))
def test_looking_at_the_order_changes_nothing_in_it(name, history, looked_at):
    policy, same = POLICIES[name](BUDGET), POLICIES[name](BUDGET)
    replay(policy, history)
    replay(same, history)
    # The first look lets S3-FIFO move used entries on; from then on the order stands.
    assert order(policy) == order(same)

    with closing(policy.coldest_first()) as keys:
        for _, _ in zip(range(looked_at), keys, strict=False):
            pass

    assert order(policy) == order(same)


@given(
    factories,
    st.lists(st.tuples(names, st.integers(1, 40), st.sampled_from([b"a", b"b"])), max_size=40),
    st.sets(names, max_size=4),
    st.integers(0, 60),
)
def test_victims_make_room_whenever_that_is_possible(name, offers, spared, quota):
    catalog = Catalog(BUDGET, POLICIES[name], quota_bytes=quota)
    for key, size, namespace in offers:
        if key in catalog:
            catalog.touch([key], 1.0)
            continue
        incoming = {namespace: size}
        before = list(catalog)
        victims = catalog.victims(incoming, spare=spared)

        assert list(catalog) == before
        assert len(set(victims)) == len(victims)
        assert not set(victims) & spared
        fits = catalog.fits(incoming, victims)
        if not fits:
            everything = [key for key in catalog if key not in spared]
            assert not catalog.fits(incoming, everything)
            continue
        for victim in victims:
            catalog.remove(victim, evicted=True)
        catalog.add(key, entry(size, namespace=namespace))
        assert catalog.used_bytes == sum(catalog[k].size_bytes for k in catalog) <= BUDGET
        for used in catalog.namespace_bytes().values():
            assert 0 < used <= (quota or BUDGET)


@given(
    st.lists(st.tuples(names, st.integers(0, 9)), min_size=1, max_size=12, unique_by=lambda p: p[0])
)
def test_a_prompts_last_chunk_leaves_before_those_it_needs(chunks):
    catalog = Catalog(1000, Lru)
    for key, start in chunks:
        catalog.add(key, entry(start=start))

    catalog.touch([key for key, _ in chunks], 1.0)

    starts = [catalog[key].start for key in catalog.victims({b"n": 1000})]
    assert starts == sorted(starts, reverse=True)


def test_lru_evicts_what_was_not_used_for_longest():
    catalog = Catalog(3, Lru)
    for key in (b"a", b"b", b"c"):
        catalog.add(key, entry())
    catalog.touch([b"a"], 1.0)

    assert catalog.victims({b"n": 2}) == [b"b", b"c"]


def test_arc_keeps_what_was_used_again_through_a_scan():
    kept = {}
    for policy in (Arc, Lru):
        catalog = Catalog(10, policy)
        catalog.add(b"hot", entry())
        catalog.touch([b"hot"], 1.0)
        for number in range(50):
            for victim in catalog.victims({b"n": 1}):
                catalog.remove(victim, evicted=True)
            catalog.add(b"scan %d" % number, entry())
        kept[policy] = b"hot" in catalog

    assert kept == {Arc: True, Lru: False}


def test_arc_learns_from_keys_that_come_back():
    policy = Arc(4)
    held = replay(policy, [("store", b"a", 1), ("store", b"b", 1), ("use", b"b", 1)])
    first = order(policy)
    policy.remove(b"a", held.pop(b"a"), evicted=True)

    policy.insert(b"a", entry())
    policy.insert(b"c", entry())

    # "a" was evicted too early: it now counts as used again, and "once" gets a larger share.
    assert first == [b"b", b"a"]
    assert order(policy) == [b"b", b"a", b"c"]


def test_s3fifo_lets_what_was_never_used_go_first():
    policy = S3Fifo(10)

    replay(policy, [("store", b"a", 3), ("use", b"a", 1), ("store", b"b", 3), ("store", b"c", 3)])

    assert order(policy) == [b"b", b"c", b"a"]


def test_gdsf_keeps_what_saves_most_per_byte():
    policy = Gdsf(10)
    policy.insert(b"dear", entry(1, cost_ms=9.0))
    policy.insert(b"cheap", entry(1, cost_ms=1.0))
    policy.insert(b"bulky", entry(30, cost_ms=9.0))

    assert order(policy) == [b"bulky", b"cheap", b"dear"]


def test_a_known_key_cannot_be_added_twice():
    catalog = Catalog(10)
    catalog.add(b"a", entry())

    with pytest.raises(KeyError):
        catalog.add(b"a", entry())


def test_the_hottest_are_those_used_last_and_of_a_prompt_the_earliest():
    catalog = Catalog(BUDGET)
    for number in range(6):
        catalog.add(b"%d" % number, entry(10, start=number))
    catalog.touch([b"4", b"5", b"1"], 7.0)

    assert catalog.hottest(10, 1000) == [b"1", b"4", b"5", b"0", b"2", b"3"]
    assert catalog.hottest(10, 25) == [b"1", b"4"]
    assert catalog.hottest(1, 1000) == [b"1"]
