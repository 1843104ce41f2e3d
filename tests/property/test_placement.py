"""Rendezvous hashing: deterministic, balanced, and moving no key that it need not."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.cluster.placement import NODE_LIMIT, Placement

names = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=12)
keys = st.lists(st.binary(min_size=32, max_size=32), max_size=40)
MANY = [hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(8000)]


@given(names, keys)
def test_owners_do_not_depend_on_the_order_or_repetition_of_nodes(
    nodes: set[str], some: list[bytes]
) -> None:
    listed = sorted(nodes, reverse=True)
    assert Placement(listed + listed).owners(some) == Placement(nodes).owners(some)


@given(names, keys, st.text(min_size=1, max_size=8))
def test_a_node_that_comes_wins_keys_and_moves_no_other(
    nodes: set[str], some: list[bytes], newcomer: str
) -> None:
    before = Placement(nodes).owners(some)
    after = Placement(nodes | {newcomer}).owners(some)
    assert all(new in (old, newcomer) for old, new in zip(before, after, strict=True))


@given(names, keys)
def test_groups_hold_every_key_once_with_its_owner(nodes: set[str], some: list[bytes]) -> None:
    placement = Placement(nodes)
    groups = placement.group(some)
    assert sorted(key for group in groups.values() for key in group) == sorted(some)
    assert all(placement.owner(key) == node for node, group in groups.items() for key in group)


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_keys_are_spread_evenly(count: int) -> None:
    groups = Placement(f"node-{n}" for n in range(count)).group(MANY)
    fair = len(MANY) / count
    # Four standard deviations of a fair draw; the keys are fixed, so this cannot flicker.
    slack = 4 * (fair * (1 - 1 / count)) ** 0.5
    assert all(abs(len(group) - fair) < slack for group in groups.values())
    assert len(groups) == count


def test_another_process_computes_the_same_owners() -> None:
    script = (
        "from rakv_cluster.cluster.placement import Placement;"
        "print(Placement('abc').owners([bytes([n] * 32) for n in range(99)]))"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(Placement("abc").owners([bytes([n] * 32) for n in range(99)]))


def test_without_nodes_there_is_no_owner() -> None:
    with pytest.raises(LookupError):
        Placement(()).owner(MANY[0])
    assert Placement(()).group(MANY) == {}


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="4097 nodes"):
        Placement(str(n) for n in range(NODE_LIMIT + 1))
