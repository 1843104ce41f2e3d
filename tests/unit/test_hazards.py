"""Acceptance estimates: where they start, how they move, what is counted."""

from __future__ import annotations

import pytest

from rakv_cluster.speculation.arms import ArmCosts
from rakv_cluster.speculation.drafters import Draft
from rakv_cluster.speculation.hazards import (
    PRIOR_FIRST,
    PRIOR_LATER,
    AcceptanceTracker,
    ReplicaHazards,
    ScoredTrial,
)


def observe(
    subject: AcceptanceTracker,
    drafts: list[int],
    match_tokens: int,
    emitted: list[int],
    chosen: int,
) -> list[ScoredTrial]:
    """One step: a guess is opened, ``chosen`` of it are checked, tokens come."""
    subject.open(Draft(tuple(drafts), match_tokens), ArmCosts(chosen, 1.0, ()))
    return subject.follow(emitted)


def tracker() -> AcceptanceTracker:
    return AcceptanceTracker(ReplicaHazards())


def test_a_new_request_on_a_new_replica_starts_from_the_prior() -> None:
    chances = tracker().survivals(5, 3)

    assert chances == pytest.approx(
        [PRIOR_FIRST, PRIOR_FIRST * PRIOR_LATER, PRIOR_FIRST * PRIOR_LATER**2]
    )


def test_a_new_request_starts_from_what_the_replica_learned() -> None:
    replica = ReplicaHazards()
    first = AcceptanceTracker(replica)
    for position in range(200):
        observe(first, [position, -1], 5, [position], 1)

    # A new request's last outcome is unknown: the same context again teaches about it.
    for _ in range(50):
        observe(AcceptanceTracker(replica), [7], 5, [7], 1)

    assert AcceptanceTracker(replica).survivals(5, 1)[0] > 0.85


def test_a_guess_is_scored_against_the_tokens_that_follow_later() -> None:
    subject = tracker()
    assert observe(subject, [1, 2, 3], 5, [1], 0) == []
    assert observe(subject, [], 0, [2], 0) == []

    settled = observe(subject, [], 0, [9], 0)

    assert [trial.accepted for trial in settled] == [2]


def test_a_token_guessed_right_at_k_0_is_no_decision_point() -> None:
    subject = tracker()
    observe(subject, [1, 2], 5, [1], 0)
    observe(subject, [2, 9], 5, [2], 0)  # would have been emitted with the token before
    observe(subject, [3, 4], 5, [3], 0)

    unknown, hit = subject.hazards.by_position()[0], subject.context(5)

    assert unknown == 1.0
    settled = observe(subject, [], 0, [4], 0)
    assert len(settled) == 1  # the guess on the skipped token was never opened
    assert hit == subject.context(5)


def test_every_drafted_step_is_a_decision_point() -> None:
    subject = tracker()
    settled = observe(subject, [1, 2], 5, [1, 2, 3], 2)
    settled += observe(subject, [4, 5], 5, [4, 6], 2)

    assert [trial.accepted for trial in settled] == [2, 1]


def test_recent_misses_lower_the_estimate_within_a_few_steps() -> None:
    subject = tracker()
    for position in range(40):
        observe(subject, [position], 20, [position], 1)
    sure = subject.survivals(20, 1)[0]

    for _ in range(3):
        observe(subject, [1], 20, [2], 1)

    assert sure > 0.8
    # After a miss another cell is asked: one that has seen misses only.
    assert subject.survivals(20, 1)[0] < 0.45


def test_deep_positions_share_the_last_hazard() -> None:
    subject = tracker()
    for _ in range(30):
        observe(subject, list(range(15)), 20, list(range(16)), 15)

    chances = subject.survivals(20, 15)

    assert chances == sorted(chances, reverse=True)
    assert chances[14] / chances[13] == pytest.approx(chances[6] / chances[5])


def test_a_guess_that_is_only_watched_teaches_and_is_no_choice() -> None:
    replica = ReplicaHazards()
    subject = AcceptanceTracker(replica)
    costs = ArmCosts(1, 1.0, ())

    subject.watch(Draft((5, 6), 2), costs)
    subject.open(Draft((7, 8)), costs)
    settled = subject.follow([7, 9])

    assert [trial.accepted for trial in settled] == [1]
    assert AcceptanceTracker(replica).survivals(2, 1)[0] < PRIOR_FIRST
    assert AcceptanceTracker(replica).survivals(0, 1)[0] > PRIOR_FIRST


def test_a_depth_that_was_never_drafted_is_as_likely_as_the_one_in_front_of_it() -> None:
    replica = ReplicaHazards()
    replica.assume(0.8)
    subject = AcceptanceTracker(replica)
    for _ in range(200):
        observe(subject, [1, 2], 0, [1, 2, 3], 2)

    chances = AcceptanceTracker(replica).survivals(0, 5)

    assert chances[4] > 0.8  # five times 0.8 would be 0.33


def test_a_models_drafts_behind_a_miss_are_judged_with_all_others() -> None:
    replica = ReplicaHazards()
    replica.assume(0.8)
    for _ in range(100):
        observe(AcceptanceTracker(replica), [1], 0, [1, 2], 1)
    subject = AcceptanceTracker(replica)
    observe(subject, [1], 0, [5], 1)

    assert subject.survivals(0, 1)[0] > 0.85
