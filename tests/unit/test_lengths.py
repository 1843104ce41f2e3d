"""What is known of an answer's length before it is there."""

from __future__ import annotations

from rakv_cluster.speculation.lengths import AnswerLengths


def test_nothing_is_sure_before_enough_answers_were_seen() -> None:
    subject = AnswerLengths()
    for _ in range(2):
        subject.record(100, limit=100)

    assert subject.sure_tokens(100) == 0
    subject.record(100, limit=100)
    assert 90 <= subject.sure_tokens(100) <= 100


def test_a_length_is_sure_that_nine_answers_in_ten_reach() -> None:
    subject = AnswerLengths()
    for index in range(100):
        subject.record(12 if index % 5 == 0 else 200, limit=256)

    assert 10 <= subject.sure_tokens(256) <= 12


def test_answers_that_were_cut_by_a_lower_limit_say_nothing_about_longer_ones() -> None:
    subject = AnswerLengths()
    for _ in range(20):
        subject.record(30, limit=30)
        subject.record(300, limit=300)

    assert 25 <= subject.sure_tokens(30) <= 30
    assert 270 <= subject.sure_tokens(300) <= 300


def test_answers_that_have_become_short_are_found_out() -> None:
    subject = AnswerLengths()
    for _ in range(100):
        subject.record(200, limit=200)
    for _ in range(7):
        subject.record(8, limit=200)

    assert subject.sure_tokens(200) <= 8
