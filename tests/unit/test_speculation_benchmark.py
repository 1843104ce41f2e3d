"""What the benchmarks of speculation compute from their measurements."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paired import bootstrap, geometric_mean, median
from benchmarks.rakv_asd import Block, Journal
from benchmarks.rakv_asd_pairs import Pair, model_and_draft
from benchmarks.speculation_ledger import Booked, foresee, overspend, worst_window
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable

PHRASE = list(range(10, 30))


def costs(**ms_by_rows: float) -> CostTable:
    table = CostTable(CostBuckets())
    for rows in (1, 2, 3, 4, 6, 8, 12, 16):
        table.observe(CostSample(rows, 256, 1, ms_by_rows.get(f"r{rows}", 10.0)))
    return table


def test_the_oracle_is_never_slower_than_a_fixed_number() -> None:
    output = [1, 2, *PHRASE, 3, *PHRASE, 4, 5, *PHRASE[:7]]

    seen = foresee([9, *PHRASE], output, costs(r8=12.0, r12=14.0, r16=18.0), (1, 2, 4, 8, 15))

    assert seen.plain_ms == pytest.approx(10.0 * (len(output) - 1))
    assert all(seen.oracle_ms <= ms + 1e-9 for ms in seen.fixed_ms.values())
    assert seen.oracle_ms < 0.4 * seen.plain_ms


def test_without_repetition_nobody_gains() -> None:
    seen = foresee([1, 2, 3], [4, 5, 6, 7], costs(), (1, 15))

    assert seen.oracle_ms == pytest.approx(seen.plain_ms)
    assert seen.fixed_ms[15] == pytest.approx(seen.plain_ms)


def test_the_worst_window_is_found_inside_a_good_run() -> None:
    good, bad = Booked(1, 5.0, 10.0), Booked(1, 11.0, 10.0)
    steps = [good] * 2_000 + [bad] * 1_000 + [good] * 2_000

    assert overspend(steps) < -0.3
    assert worst_window(steps) == pytest.approx(0.1)
    assert worst_window(steps[:100]) == pytest.approx(-0.5)


def test_intervals_hold_the_estimate_and_shrink_with_the_spread() -> None:
    ratios = [0.5, 1.0, 1.5, 2.0, 0.7]
    wide = bootstrap(ratios, geometric_mean, seed=1)
    inverse = bootstrap([1 / ratio for ratio in ratios], geometric_mean, seed=1)
    narrow = bootstrap([1.0] * 5, median, seed=1)

    assert wide.value == pytest.approx(1.05 ** (1 / 5))
    assert inverse.value == pytest.approx(1 / wide.value)
    assert wide.low < wide.value < wide.high
    assert narrow.low == narrow.value == narrow.high == 1.0
    with pytest.raises(ValueError, match="no values"):
        bootstrap([], geometric_mean, seed=1)


def test_a_run_that_was_killed_goes_on_behind_its_last_whole_block(tmp_path: Path) -> None:
    pair = Pair("model", "6", 0.0)
    block = Block("now", pair.name, 64, 32, 0, {"K=0": 1.5}, 32, True, {"K=0": 0.0}, 0.0)
    first = Journal(tmp_path / "report.json", "now")
    first.add(block)
    first.add(replace(block, index=1))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '{"recipe": "now", "pa')

    second = Journal(tmp_path / "report.json", "now")
    second.add(replace(block, index=2))

    assert second.of(pair) == [block, replace(block, index=1), replace(block, index=2)]
    assert Journal(tmp_path / "report.json", "now").of(pair) == second.of(pair)
    assert Journal(tmp_path / "report.json", "other").count(pair) == 0
    assert Journal(None, "now").count(pair) == 0


def test_a_pair_is_a_model_and_what_drafts_for_it() -> None:
    assert model_and_draft("a:b:6,smollm2:self") == [("a:b", "6"), ("smollm2", "self")]
    assert Pair("a:b", "6", 2.0).name == "a:b:6"
    for text in ("smollm2", "smollm2:", ":6", "smollm2:0", "smollm2:half", "smollm2:6,"):
        with pytest.raises(argparse.ArgumentTypeError):
            model_and_draft(text)
