"""Break-even acceptance and hindsight."""

from __future__ import annotations

import pytest

from rakv_cluster.speculation.arms import ARMS, ArmCosts
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.speculation.report import HindsightTally, arm_reports, break_even


def test_break_even_of_known_cases() -> None:
    assert break_even(1, 1.25) == pytest.approx(0.25)
    assert break_even(2, 1.75) == pytest.approx(0.5)
    assert break_even(4, 1.0) == pytest.approx(0.0, abs=1e-9)
    assert break_even(4, 5.0) == 1.0
    assert break_even(4, 9.0) == 1.0


def arm_costs(chosen: int, *, per_row: float) -> ArmCosts:
    costs = StepCosts(
        tuple(range(1, 17)), tuple(10.0 * (1 + per_row * extra) for extra in range(16))
    )
    return ArmCosts.of(costs, base_rows=1, chosen=chosen, available=15)


def test_hindsight_names_the_best_fixed_arm_and_the_regret() -> None:
    tally = HindsightTally()
    for accepted in (0, 4, 4, 4):
        tally.add(accepted, arm_costs(0, per_row=0.1))

    assert tally.best_arm == 4
    assert tally.rate(4) == pytest.approx((1 + 5 + 5 + 5) / (4 * 14.0))
    assert tally.regret == pytest.approx(1 - 0.1 / tally.rate(4))


def test_choosing_per_step_can_beat_every_fixed_arm() -> None:
    tally = HindsightTally()
    tally.add(0, arm_costs(0, per_row=0.5))
    tally.add(4, arm_costs(4, per_row=0.5))

    assert tally.regret < 0


def test_tallies_add_up() -> None:
    one, other = HindsightTally(), HindsightTally()
    one.add(2, arm_costs(1, per_row=0.1))
    other.add(0, arm_costs(3, per_row=0.1))

    one.merge(other)

    assert one.points == 2
    assert one.arm_tokens[ARMS.index(2)] == 3 + 1
    assert one.chosen_tokens == 2 + 1


def test_arms_whose_cost_is_unknown_are_not_reported() -> None:
    costs = StepCosts((1, 2, 4), (10.0, 11.0, 12.0))

    reports = arm_reports(costs, HindsightTally())

    assert [report.drafts for report in reports] == [0, 1, 2, 3]
    assert reports[1].break_even_acceptance == pytest.approx(0.1)
    assert arm_reports(StepCosts(), HindsightTally()) == ()
