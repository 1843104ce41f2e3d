"""What is known of an answer's length before it is there."""

from __future__ import annotations

import pytest

from rakv_cluster.speculation.lengths import AnswerLengths


def test_nothing_is_likely_before_enough_answers_were_seen() -> None:
    subject = AnswerLengths()
    subject.record(100, limit=100)

    assert subject.likely_tokens(100) == 0
    subject.record(100, limit=100)
    assert 90 <= subject.likely_tokens(100) <= 100


@pytest.mark.parametrize(("short_in", "reached"), [(3, 12), (6, 200)])
def test_a_length_is_likely_that_three_answers_in_four_reach(short_in: int, reached: int) -> None:
    subject = AnswerLengths()
    for index in range(100):
        subject.record(12 if index % short_in == 0 else 200, limit=256)

    assert 0.9 * reached <= subject.likely_tokens(256) <= reached


def test_answers_that_were_cut_by_a_lower_limit_say_nothing_about_longer_ones() -> None:
    subject = AnswerLengths()
    for _ in range(20):
        subject.record(30, limit=30)
        subject.record(300, limit=300)

    assert 25 <= subject.likely_tokens(30) <= 30
    assert 270 <= subject.likely_tokens(300) <= 300


def test_answers_that_have_become_short_are_found_out() -> None:
    subject = AnswerLengths()
    for _ in range(100):
        subject.record(200, limit=200)
    for _ in range(20):
        subject.record(8, limit=200)

    assert subject.likely_tokens(200) <= 8
