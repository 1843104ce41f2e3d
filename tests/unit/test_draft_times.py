"""What a model's drafts are expected to take."""

from __future__ import annotations

import pytest

from rakv_cluster.speculation.draft_rounds import MeanMs


def test_a_bad_first_measurement_is_soon_made_up_for() -> None:
    mean = MeanMs()

    for ms in (30.0, 10.0, 10.0, 10.0):
        mean.add(ms)

    assert mean.ms == pytest.approx(15.0)


def test_a_stall_counts_half_as_much_again_and_a_lasting_change_fully() -> None:
    mean = MeanMs()
    for _ in range(20):
        mean.add(10.0)

    mean.add(500.0)
    assert mean.ms == pytest.approx(10.5)
    for _ in range(80):
        mean.add(20.0)
    assert mean.ms == pytest.approx(20.0, rel=0.01)
