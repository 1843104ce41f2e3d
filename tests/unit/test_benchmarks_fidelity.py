"""What benchmarks/fidelity.py derives from its figures: times in tokens, equal time, the front."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fidelity_cases import Figures, ratio
from benchmarks.fidelity_report import Point, front
from benchmarks.fidelity_task import Task, accuracy, difference, plain, verdict
from benchmarks.fidelity_ttft import Timed, Times, over
from rakv_cluster.reuse.calibrating import Interval
from rakv_cluster.reuse.fidelity import Measured

TIMES = Times(
    {
        "no cache": 30.0, "prefix only": 29.0, "blend 0%": 1.0, "blend 5%": 2.0, "blend 15%": 4.0,
        "blend 30%": 7.0, "blend 15%, probe": 4.5, "no cache, one new in front": 20.0,
        "blend 5%, one new in front": 5.0,
    },
    layers=10,
)  # fmt: skip


def measured(kl: float) -> Measured:
    return Measured(repaired=1, kl=kl, first_kl=kl, top1=1.0, agreement=1.0)


def test_each_arm_is_compared_with_no_cache_for_its_prompt() -> None:
    assert TIMES.speedups["blend 15%"] == 7.5
    assert TIMES.speedups["blend 5%, one new in front"] == 4.0


def test_extra_work_is_worth_so_many_repaired_tokens() -> None:
    """20 s would repair everything; a layer of what is not repaired takes 0.85 * 3 s."""
    assert TIMES.probe == pytest.approx(0.5 / 20)
    assert TIMES.check == pytest.approx(0.85 * 3 / 20)


@pytest.mark.parametrize(
    ("fraction", "extra", "seconds"), [(0.15, 0.0, 4.0), (0.1, 0.0, 3.0), (0.25, 0.1, 8.0)]
)
def test_time_between_and_beyond_measured_fractions(
    fraction: float, extra: float, seconds: float
) -> None:
    assert TIMES.speedup(fraction, extra=extra) == pytest.approx(30.0 / seconds)


def test_divergence_between_measured_fractions_is_each_cases_own() -> None:
    figures = Figures(
        ["a", "b"],
        {
            ("none", 0.0): [measured(1.0), measured(2.0)],
            ("x", 0.1): [measured(0.5), measured(2.0)],
        },
    )

    assert figures.kl_at("x", 0.05).tolist() == [0.75, 2.0]
    assert figures.kl_at("x", 0.0).tolist() == [1.0, 2.0]


def test_a_ratio_is_of_sums_over_the_same_cases() -> None:
    ours, theirs = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])

    found = ratio(ours, theirs)

    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_front_has_what_nothing_beats_in_both() -> None:
    def point(name: str, speedup: float, kl: float) -> Point:
        return Point(name, speedup, Interval(kl, kl, kl))

    found = [
        point("exact", 1.0, 0.0), point("fast", 9.0, 0.5), point("worse", 8.0, 0.6),
        point("slower", 4.0, 0.2), point("as fast, worse", 9.0, 0.7),
    ]  # fmt: skip

    assert [each.name for each in front(found)] == ["fast", "slower", "exact"]


def test_an_answer_counts_whatever_its_case_articles_and_punctuation() -> None:
    assert plain("The  Beatles' album, (1969).") == "beatles album 1969"
    assert plain("theme") == "theme"


@pytest.mark.parametrize(
    ("low", "high", "prompts", "said"),
    [
        (0.0, 0.0, 399, "not established"),
        (-0.03, 0.02, 400, "within 3 points"),
        (-0.05, 0.02, 400, "not established"),
        (-0.09, -0.04, 400, "inferior"),
    ],
)
def test_an_accuracy_is_judged_by_its_interval_and_never_from_few_prompts(
    low: float, high: float, prompts: int, said: str
) -> None:
    assert verdict(Interval((low + high) / 2, low, high), prompts) == said


def test_accuracies_are_compared_prompt_by_prompt() -> None:
    full = [Task(right=True, logp=-1.0), Task(right=False, logp=-2.0)]
    mine = [Task(right=False, logp=-1.5), Task(right=False, logp=-2.0)]

    assert accuracy(full).value == 0.5
    assert difference(mine, full).value == -0.5


def test_an_arm_is_compared_round_by_round() -> None:
    """A machine that is twice as slow in the second half changes nothing."""
    base, arm = Timed([1.0, 1.0, 2.0, 2.0, 2.0]), Timed([1.1, 1.2, 2.2, 2.6, 2.2])

    assert over(arm, base) == pytest.approx(1.1)
