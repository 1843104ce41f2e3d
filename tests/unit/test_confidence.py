"""What a model's own probability says of its drafts."""

from __future__ import annotations

import pytest

from rakv_cluster.speculation.arms import ArmCosts
from rakv_cluster.speculation.confidence import EDGES, Confidence, rate_of
from rakv_cluster.speculation.draft_rounds import Stopping
from rakv_cluster.speculation.drafters import Draft
from rakv_cluster.speculation.hazards import AcceptanceTracker, ReplicaHazards


def test_surer_drafts_are_expected_to_be_right_more_often() -> None:
    rates = Confidence().rates()

    assert list(rates) == sorted(rates)
    assert len(rates) == len(EDGES) + 1
    assert rate_of(rates, 0.0) == rates[0]
    assert rate_of(rates, 1.0) == rates[-1]
    assert rate_of(rates, EDGES[0]) == rates[1]


def test_what_was_seen_of_a_band_counts_and_of_no_other() -> None:
    subject = Confidence()
    before = subject.rates()
    for index in range(400):
        subject.record(0.25, index % 10 < 7)

    after = subject.rates()

    assert rate_of(after, 0.25) == pytest.approx(0.7, abs=0.02)
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed.count(True) == 1


def test_drafts_teach_by_their_own_probabilities_as_far_as_they_were_looked_at() -> None:
    replica = ReplicaHazards()
    subject = AcceptanceTracker(replica)
    guess = Draft((5, 6, 7), confidences=(0.95, 0.25, 0.5))

    before = replica.confidence.rates()
    subject.open(guess, ArmCosts(3, 1.0, ()))
    subject.follow([5, 9])
    after = replica.confidence.rates()

    assert rate_of(after, 0.95) > rate_of(before, 0.95)
    assert rate_of(after, 0.25) < rate_of(before, 0.25)
    assert rate_of(after, 0.5) == rate_of(before, 0.5)


def test_drafting_ends_where_the_chance_that_all_are_right_is_too_small() -> None:
    rates = tuple(0.1 * band for band in range(1, len(EDGES) + 2))  # 0.9 of the surest
    stopping = Stopping(4, 0.7, rates)

    assert not stopping.ends([0.99])
    assert not stopping.ends([0.99, 0.99, 0.99])
    assert stopping.ends([0.99, 0.99, 0.99, 0.99])  # as many as may be
    assert stopping.ends([0.99, 0.01])
