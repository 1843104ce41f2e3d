"""The rolling hash against its definition, and what it finds against plain search."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.chunking.openings import OPENING_TOKENS, Openings, fingerprints

IDS = st.lists(st.integers(0, 3), min_size=0, max_size=120)


@given(ids=IDS)
def test_equal_windows_and_only_those_have_equal_hashes(ids: list[int]) -> None:
    hashes = fingerprints(ids)

    windows = [tuple(ids[i : i + OPENING_TOKENS]) for i in range(len(ids) - OPENING_TOKENS + 1)]
    assert len(hashes) == max(len(windows), 0)
    assert len(set(hashes.tolist())) == len(set(windows))


@given(
    known=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), max_size=4),
    before=IDS,
    between=IDS,
    start=st.integers(0, 20),
)
def test_known_chunks_are_guessed_wherever_they_stand(
    known: list[list[int]], before: list[int], between: list[int], start: int
) -> None:
    openings = Openings()
    ids, places = list(before), []
    for chunk in known:
        openings.add(chunk)
        places.append((len(ids), len(chunk)))
        ids += [*chunk, *between]

    guesses = openings.guesses(np.array(ids, dtype=np.int64), start)

    assert guesses == sorted(guesses, key=lambda guess: (guess[0], -guess[1]))
    wanted = {(at, size) for at, size in places if size >= OPENING_TOKENS and at >= start}
    assert wanted <= set(guesses)
    assert all(start <= at and at + size <= len(ids) for at, size in guesses)


def test_the_oldest_openings_are_forgotten() -> None:
    openings = Openings(most=2)
    chunks = [[number] * OPENING_TOKENS for number in range(3)]
    for chunk in chunks:
        openings.add(chunk)

    assert [bool(openings.guesses(chunk, 0)) for chunk in chunks] == [False, True, True]


def test_of_one_opening_the_longest_comes_first() -> None:
    openings = Openings()
    ids = list(range(60))
    for size in (40, 32, 50):
        openings.add(ids[:size])

    assert openings.guesses(ids, 0) == [(0, 50), (0, 40), (0, 32)]
    assert openings.guesses(ids[:45], 0) == [(0, 40), (0, 32)]
