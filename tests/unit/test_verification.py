"""One block of drafts, judged: acceptance, stop tokens, limits."""

from __future__ import annotations

import pytest

from rakv_cluster.speculation.verification import Verdict, block_rows, draft_limit, judge_block
from rakv_cluster.types import FinishReason

NO_STOP: frozenset[int] = frozenset()


def judge(
    drafts: list[int], chosen: list[int], *, left: int = 100, stop: frozenset[int] = NO_STOP
) -> Verdict:
    return judge_block(drafts, chosen, tokens_left=left, stop_token_ids=stop)


def test_plain_step_emits_its_choice() -> None:
    assert judge([], [5]) == Verdict(emitted=1, accepted=0, verified_rows=1)


def test_drafts_count_up_to_the_first_difference() -> None:
    assert judge([5, 6, 9], [5, 6, 7, 8]) == Verdict(emitted=3, accepted=2, verified_rows=3)


def test_a_match_behind_a_difference_does_not_count() -> None:
    assert judge([5, 6], [4, 6, 7]).emitted == 1


def test_all_accepted_emits_one_more() -> None:
    assert judge([5, 6], [5, 6, 7]) == Verdict(emitted=3, accepted=2, verified_rows=3)


def test_stop_token_inside_an_accepted_block_ends_it() -> None:
    verdict = judge([5, 2, 6], [5, 2, 6, 7], stop=frozenset({2}))

    assert verdict == Verdict(1, 3, 2, FinishReason.STOP, stop_token_id=2)
    assert verdict.plain_steps == 2


def test_stop_token_chosen_at_the_first_row() -> None:
    assert judge([5], [2, 9], stop=frozenset({2})) == Verdict(0, 0, 1, FinishReason.STOP, 2)


def test_a_drafted_stop_token_that_was_not_chosen_does_not_stop() -> None:
    assert judge([2, 6], [5, 6, 7], stop=frozenset({2})).finish is None


def test_length_limit_cuts_the_block() -> None:
    assert judge([5, 6, 7], [5, 6, 7, 8], left=2) == Verdict(2, 3, 3, FinishReason.LENGTH)
    assert judge([5], [5, 6], left=2) == Verdict(2, 1, 2, FinishReason.LENGTH)


def test_a_stop_token_behind_the_length_limit_is_not_reached() -> None:
    verdict = judge([5, 2], [5, 2, 7], left=1, stop=frozenset({2}))

    assert (verdict.finish, verdict.stop_token_id) == (FinishReason.LENGTH, -1)


def test_inconsistent_input_is_refused() -> None:
    with pytest.raises(ValueError, match="1 drafts, 1 choices"):
        judge([5], [5])
    with pytest.raises(ValueError, match="0 tokens left"):
        judge([], [5], left=0)


def test_rows_see_the_drafts_in_front_of_them_and_bans_lift_in_mid_block() -> None:
    rows = block_rows([5, 6], output_tokens=1, min_tokens=3, stop_token_ids=frozenset({2}))

    assert [row.pending for row in rows] == [(), (5,), (5, 6)]
    assert [row.output_index for row in rows] == [1, 2, 3]
    assert [row.banned for row in rows] == [frozenset({2}), frozenset({2}), frozenset()]


def test_draft_limit_leaves_room_for_the_row_behind_the_drafts() -> None:
    assert draft_limit(tokens_left=4, free_slots=100) == 3
    assert draft_limit(tokens_left=100, free_slots=2) == 1
    assert draft_limit(tokens_left=1, free_slots=1) == 0
