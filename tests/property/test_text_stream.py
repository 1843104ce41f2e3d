"""Streamed text equals whole text, whatever the bytes, the stop strings and the steps."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.engine.text import TextStream, TokenBytes

BYTES = TokenBytes([bytes([value]) for value in range(256)])
TEXTS = st.text(st.sampled_from("ab€é😀\n "), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab€é"), min_size=1, max_size=4), max_size=4)
CUTS = st.lists(st.integers(0, 200), max_size=8)


def steps(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """``ids`` in consecutive groups."""
    edges = [0, *sorted({min(cut, len(ids)) for cut in cuts}), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def stream(ids: list[int], cuts: list[int], stops: list[str]) -> tuple[list[str], str, int]:
    """Pieces shown, the stop string found, ids consumed."""
    text = TextStream(BYTES, stops=stops)
    pieces: list[str] = []
    consumed = 0
    for group in steps(ids, cuts):
        delta = text.push(group)
        pieces.append(delta.text)
        consumed += delta.consumed
        if delta.stop:
            return pieces, delta.stop, consumed
    rest = text.finish()
    return [*pieces, rest.text], rest.stop, consumed


def first_completed(text: str, stops: list[str]) -> tuple[str, str]:
    """Model: text before the stop string that is complete first, and that stop string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, ""


@given(st.binary(max_size=60), CUTS)
def test_pieces_join_to_the_whole_text_for_any_bytes(raw: bytes, cuts: list[int]) -> None:
    pieces, _, consumed = stream(list(raw), cuts, [])

    assert "".join(pieces) == raw.decode("utf-8", errors="replace") == BYTES.text(list(raw))
    assert consumed == len(raw)


@given(TEXTS, CUTS)
def test_no_piece_ends_inside_a_character(text: str, cuts: list[int]) -> None:
    pieces, _, _ = stream(list(text.encode()), cuts, [])

    assert not any("\ufffd" in piece for piece in pieces)


@given(TEXTS, STOPS, CUTS)
def test_the_text_ends_before_the_stop_that_is_complete_first(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces, stop, _ = stream(list(text.encode()), cuts, stops)

    assert ("".join(pieces), stop) == first_completed(text, stops)


@given(TEXTS, STOPS, CUTS, CUTS)
def test_how_ids_are_grouped_changes_nothing(
    text: str, stops: list[str], cuts: list[int], others: list[int]
) -> None:
    ids = list(text.encode())

    pieces, stop, consumed = stream(ids, cuts, stops)
    other_pieces, other_stop, other_consumed = stream(ids, others, stops)

    assert ("".join(pieces), stop, consumed) == ("".join(other_pieces), other_stop, other_consumed)


@given(TEXTS, STOPS)
def test_nothing_shown_is_ever_taken_back(text: str, stops: list[str]) -> None:
    whole = "".join(stream(list(text.encode()), [], stops)[0])
    shown = ""
    stream_ = TextStream(BYTES, stops=stops)

    for token_id in text.encode():
        delta = stream_.push([token_id])
        shown += delta.text
        assert whole.startswith(shown)
        if delta.stop:
            break
