"""Suffix drafter: what it proposes, and what it costs in memory."""

from __future__ import annotations

from rakv_cluster.speculation.drafters import NO_DRAFT, Draft, NullDrafter, SuffixDrafter


def drafter_over(*token_ids: int, **limits: int) -> SuffixDrafter:
    drafter = SuffixDrafter(**limits)
    drafter.extend(token_ids)
    return drafter


def test_follows_the_longest_repeated_suffix() -> None:
    # "7 1 2" occurs once before; the shorter "1 2" occurs later with another continuation.
    drafter = drafter_over(7, 1, 2, 30, 31, 9, 1, 2, 40, 41, 7, 1, 2)

    draft = drafter.propose(2)

    assert draft.token_ids == (30, 31)
    assert draft.match_tokens == 3


def test_the_most_recent_of_equally_long_matches_wins() -> None:
    drafter = drafter_over(1, 2, 30, 1, 2, 40, 1, 2)

    assert drafter.propose(1).token_ids == (40,)


def test_a_loop_drafts_past_the_end_of_what_was_seen() -> None:
    drafter = drafter_over(5, 6, 7, 5, 6, 7, 5, 6)

    assert drafter.propose(8).token_ids == (7, 5, 6, 7, 5, 6, 7, 5)


def test_a_single_token_is_followed_where_nothing_longer_is() -> None:
    assert drafter_over(1, 2, 3, 2, 1).propose(2) == Draft((2, 3), 1)
    assert drafter_over(1, 8, 2, 1, 9, 3, 1).propose(1) == Draft((9,), 1)  # the latest one


def test_a_token_that_was_never_seen_means_no_draft() -> None:
    assert drafter_over(1, 2, 3).propose(4) == NO_DRAFT
    assert drafter_over(1).propose(4) == NO_DRAFT
    assert SuffixDrafter().propose(4) == NO_DRAFT
    assert NullDrafter().propose(4) == NO_DRAFT


def test_no_room_means_no_draft() -> None:
    assert drafter_over(1, 2, 1, 2).propose(0) == NO_DRAFT


def test_a_source_that_keeps_predicting_right_is_kept() -> None:
    drafter = drafter_over(1, 2, 3, 4, 5, 9, 1, 2)
    assert drafter.propose(2).token_ids == (3, 4)

    drafter.extend([3, 4])

    assert drafter.propose(1).token_ids == (5,)
    assert drafter.propose(1).match_tokens == 4


def test_a_rejected_draft_leaves_no_trace() -> None:
    asked, untouched = drafter_over(1, 2, 3, 1, 2), drafter_over(1, 2, 3, 1, 2)
    asked.propose(3)

    for drafter in (asked, untouched):
        drafter.extend([8, 1, 2])

    assert asked.propose(3) == untouched.propose(3)


def test_memory_is_bounded_and_old_tokens_are_forgotten() -> None:
    drafter = drafter_over(1, 2, 3, window_tokens=50)
    for start in range(100, 1_000, 9):
        drafter.extend(range(start, start + 9))
        assert drafter.indexed_tokens <= 100

    drafter.extend([1, 2])

    assert drafter.propose(1) == NO_DRAFT


def test_a_source_inside_the_window_survives_forgetting() -> None:
    drafter = drafter_over(*range(1_000, 1_090), 1, 2, 3, 4, 5, 9, 1, 2, window_tokens=50)
    assert drafter.propose(1).token_ids == (3,)

    drafter.extend([3, 4, 77])  # over twice the window: the oldest tokens go

    assert drafter.indexed_tokens == 50
    assert drafter.propose(1) == NO_DRAFT
    drafter.extend([1, 2, 3, 4])
    assert drafter.propose(1).token_ids == (77,)
    assert drafter.propose(1).match_tokens == 4
