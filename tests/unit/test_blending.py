"""The pure parts of blending: hits, positions, selectors, the calibration's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.openings import Openings
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.errors import ConfigError
from rakv_cluster.reuse.blending import (
    DonorLoad,
    Guess,
    chunk_guesses,
    content_hits,
    offset_guesses,
    positions_to_compute,
    reused_positions,
)
from rakv_cluster.reuse.calibration import (
    Calibration,
    Choice,
    CurvePoint,
    calibration_path,
    load_calibration,
    save_calibration,
)
from rakv_cluster.reuse.selection import (
    SELECTORS,
    Reused,
    Selector,
    at_random,
    default_selector,
    evenly_spread,
    first_of_runs,
    most_attended,
    most_deviating,
    most_important,
    most_sensitive,
    probed_selector,
    unknown,
)
from rakv_cluster.store.base import Found
from rakv_cluster.types import ChunkedPrompt, Tier

NAMESPACE = bytes(32)
CUTS = CutTable(np.zeros(100, dtype=np.uint8))
LIMITS = ChunkLimits(min_tokens=4, max_tokens=4)


def prompt_of(*segments: Sequence[int]) -> ChunkedPrompt:
    return chunk_prompt(NAMESPACE, segments, CUTS, LIMITS)


def stored(token_ids: Sequence[int], start: int) -> Found:
    return Found(tuple(token_ids), Tier.RAM, 100, 1.0, "c", NAMESPACE, start, 0.0)


def everywhere(prompt: ChunkedPrompt, start: int) -> tuple[dict[bytes, bytes], dict[bytes, Found]]:
    """A donor for each chunk, under its own content key, computed from ``start`` on."""
    donors = {chunk.content_key: chunk.content_key for chunk in prompt.chunks}
    found = {chunk.content_key: stored(chunk.token_ids, start) for chunk in prompt.chunks}
    return donors, found


def test_hits_are_what_stands_behind_the_exact_prefix() -> None:
    prompt = prompt_of(range(4), range(4, 8), range(8, 12), [50])
    donors, found = everywhere(prompt, start=40)

    hits = content_hits(chunk_guesses(prompt, 4), donors, found)

    assert [(hit.start, hit.end, hit.distance) for hit in hits] == [(4, 8, -36), (8, 12, -32)]


def test_the_first_and_the_last_position_are_always_computed() -> None:
    prompt = prompt_of(range(4), range(4, 8))
    donors, found = everywhere(prompt, start=40)

    (hit,) = content_hits(chunk_guesses(prompt, 0), donors, found)

    assert (hit.start, hit.token_ids) == (4, (4, 5, 6))


def test_kv_with_the_sink_and_other_tokens_are_no_hits() -> None:
    prompt = prompt_of(range(4), range(4, 8), [50])
    donors, found = everywhere(prompt, start=0)
    lying = {key: replace(each, token_ids=(9, 9, 9, 9), start=8) for key, each in found.items()}

    guesses = chunk_guesses(prompt, 0)
    assert content_hits(guesses, donors, found) == ()
    assert content_hits(guesses, donors, lying) == ()


def test_a_quoted_chunk_is_found_at_its_offset_beside_hits_at_borders() -> None:
    quoted = tuple(40 + index % 50 for index in range(40))
    openings = Openings()
    openings.add(quoted)
    prompt = prompt_of(range(4), range(4, 8), [9, 9, 9, *quoted, 9, 9], [50])
    guesses = chunk_guesses(prompt, 4) + offset_guesses(prompt, openings, 4)
    donors = {guess.content_key: guess.content_key for guess in (guesses[0], guesses[-1])}
    found = {guess.content_key: stored(guess.token_ids, 70) for guess in (guesses[0], guesses[-1])}

    hits = content_hits(guesses, donors, found)

    assert [(hit.start, hit.end) for hit in hits] == [(4, 8), (11, 51)]


def test_guesses_that_overlap_leave_the_token_to_the_first() -> None:
    prompt = prompt_of(range(4), range(4, 8), [50])
    (first,) = chunk_guesses(prompt, 4)
    second = Guess(6, (6, 7), b"second")
    donors = {first.content_key: b"a", second.content_key: b"b"}
    found = {b"a": stored(first.token_ids, 9), b"b": stored(second.token_ids, 9)}

    assert [hit.start for hit in content_hits([first, second], donors, found)] == [4]
    assert [hit.start for hit in content_hits([second, first], donors, found)] == [6]


def load(start: int, length: int, donor_start: int) -> DonorLoad:
    return DonorLoad(b"k", start, tuple(range(length)), donor_start, Tier.RAM, 1)


def test_offsets_go_on_through_a_run_and_start_again_behind_a_gap_or_another_move() -> None:
    loads = [load(4, 3, 10), load(7, 2, 13), load(9, 2, 40), load(15, 2, 46)]

    figures = [np.zeros(len(each.token_ids), np.float32) for each in loads]
    reused = reused_positions(loads, figures, figures)

    assert reused.positions.tolist() == [4, 5, 6, 7, 8, 9, 10, 15, 16]
    assert reused.offsets.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1]


def test_what_is_not_reused_is_computed() -> None:
    left = positions_to_compute(np.array([4, 5, 6, 9]), np.array([5]), covered=3, total=12)

    assert left.tolist() == [3, 5, 7, 8, 10, 11]


@st.composite
def reused_sets(draw: st.DrawFn) -> Reused:
    runs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=4))
    positions: list[int] = []
    offsets: list[int] = []
    at = 1
    for gap, length in runs:
        at += gap
        positions += range(at, at + length)
        offsets += range(length)
        at += length
    scores = st.one_of(st.just(float("nan")), st.floats(0, 10, width=32))
    figures = [
        np.array(draw(st.lists(scores, min_size=len(positions), max_size=len(positions))))
        for _ in range(4)
    ]
    return Reused(
        np.array(positions, dtype=np.int64),
        np.array(offsets, dtype=np.int64),
        *(each.astype(np.float32) for each in figures),
    )


SPENDING = {
    "first": first_of_runs,
    "sensitivity": most_sensitive,
    "deviation": most_deviating,
    "random": at_random(3),
    "default": default_selector,
    "importance": most_important,
    "attention": most_attended,
    "spread": evenly_spread,
    "probed": probed_selector,
}


@pytest.mark.parametrize("name", SPENDING)
@given(reused=reused_sets(), count=st.integers(0, 40))
def test_a_selector_spends_exactly_its_count(name: str, reused: Reused, count: int) -> None:
    chosen = SPENDING[name](reused, count)

    assert len(chosen) == min(count, len(reused.positions))
    assert len(set(chosen.tolist())) == len(chosen)
    assert chosen.tolist() == sorted(chosen.tolist())
    assert set(chosen.tolist()) <= set(reused.positions.tolist())


@given(reused=reused_sets(), count=st.integers(0, 40))
def test_no_unchosen_token_is_more_sensitive(reused: Reused, count: int) -> None:
    chosen = np.isin(reused.positions, most_sensitive(reused, count))
    figures = np.where(np.isnan(reused.sensitivity), -1.0, reused.sensitivity)

    if chosen.any() and not chosen.all():
        assert figures[chosen].min() >= figures[~chosen].max()


def test_the_first_tokens_of_each_run_come_before_second_ones() -> None:
    figures = [np.zeros(3, np.float32)] * 2
    reused = reused_positions([load(4, 3, 10), load(10, 3, 40)], figures, figures)

    assert first_of_runs(reused, 3).tolist() == [4, 5, 10]


def test_spread_positions_are_as_far_from_each_other_as_from_the_ends() -> None:
    reused = reused_positions([load(4, 12, 10)], *[[np.zeros(12, np.float32)]] * 2)

    assert evenly_spread(reused, 3).tolist() == [6, 10, 14]


def test_the_probe_leaves_a_sixth_or_so_to_spread_ones() -> None:
    """Attention grows to the end: 17 of 20 are the last ones, 3 divide the rest."""
    figures = np.arange(100, dtype=np.float32)
    reused = reused_positions([load(1, 100, 10)], [unknown(100)], [unknown(100)])

    chosen = probed_selector(replace(reused, attention=figures), 20)

    assert chosen.tolist() == [17, 51, *range(83, 101)]


def test_runs_are_numbered_where_distance_or_order_breaks() -> None:
    """Two loads side by side that move by one distance are one run; then a gap, then another."""
    figures = [np.zeros(2, np.float32)] * 4
    reused = reused_positions(
        [load(1, 2, 11), load(3, 2, 13), load(6, 2, 16), load(8, 2, 40)], figures, figures
    )

    assert reused.runs.tolist() == [-1, 0, 0, 0, 0, -1, 1, 1, 2, 2]


def test_the_default_halves_its_count_as_far_as_importance_is_known() -> None:
    """Of 4 tokens one is the most important of the half that is known, one is first, and two stand
    in the middle of either half of what is left."""
    important = np.array([0, 1, 3, 2], dtype=np.float32)
    reused = reused_positions(
        [load(4, 4, 10), load(10, 4, 40)], [unknown(4)] * 2, [unknown(4), important]
    )

    assert default_selector(reused, 4).tolist() == [4, 6, 11, 12]


@pytest.mark.parametrize("selector", [most_important, most_attended])
def test_attention_counts_as_far_as_the_token_is_sensitive(selector: Selector) -> None:
    """Scores of 2, 6, 4 and, where sensitivity is not known, 5."""
    attention = np.array([2, 2, 4, 5], np.float32)
    sensitivity = np.array([1, 9, 1, np.nan], np.float32)
    reused = reused_positions([load(4, 4, 10)], [sensitivity], [attention])
    reused = replace(reused, attention=attention)

    assert selector(reused, 2).tolist() == [5, 7]


def test_the_controls_repair_nothing_and_everything() -> None:
    reused = reused_positions([load(4, 3, 10)], *[[np.zeros(3, np.float32)]] * 2)

    assert SELECTORS["none"](reused, 2).tolist() == []
    assert SELECTORS["all"](reused, 2).tolist() == [4, 5, 6]


def point(fraction: float, kl: float, upper: float) -> CurvePoint:
    return CurvePoint(fraction, kl, kl, kl, kl, upper, 0.9, 0.8, 1.0, 0.5, 0.4, 0.6)


CURVE = Calibration(
    "m", 8, "texts", (point(0.0, 0.4, 0.9), point(0.15, 0.2, 0.5), point(0.5, 0.02, 0.08),
                      point(0.7, 0.01, 0.02)),
    (point(0.0, 0.4, 0.9), point(0.15, 0.1, 0.09)),
)  # fmt: skip


def test_the_smallest_fraction_that_meets_the_budget() -> None:
    assert CURVE.choose(0.5).fraction == 0.15
    assert CURVE.choose(0.1).fraction == 0.5
    assert CURVE.choose(0.1).expected_kl == 0.02


def test_each_way_to_select_has_its_own_curve() -> None:
    assert CURVE.choose(0.1, probed=True) == Choice(0.15, 0.1, probed=True)
    assert CURVE.expected_kl(0.075, probed=True) == pytest.approx(0.25)
    assert "best: 0.09" in CURVE.choose(0.05, probed=True).refusal


def test_a_budget_that_needs_too_much_repair_is_refused_with_the_reason() -> None:
    assert "best: 0.08" in CURVE.choose(0.05).refusal
    assert "not calibrated" in Calibration().choose(10.0).refusal


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0.4), (0.075, 0.3), (0.15, 0.2), (0.9, 0.01)]
)
def test_expected_divergence_between_measured_fractions(fraction: float, expected: float) -> None:
    assert CURVE.expected_kl(fraction) == pytest.approx(expected)
    assert Calibration().expected_kl(fraction) == -1.0


def test_a_calibration_is_kept_per_model(tmp_path: Path) -> None:
    path = calibration_path(tmp_path, b"\x01\x02")
    save_calibration(CURVE, path)

    assert load_calibration(path) == CURVE
    assert load_calibration(calibration_path(tmp_path, b"\x03")) == Calibration()


def test_a_calibration_of_an_older_version_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"format": 2, "points": []}')

    assert load_calibration(path) == Calibration()


@pytest.mark.parametrize("content", ["", "[]", '{"format": 9}', '{"format": 3, "points": 3}'])
def test_a_file_that_is_no_calibration_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match="no calibration"):
        load_calibration(path)
