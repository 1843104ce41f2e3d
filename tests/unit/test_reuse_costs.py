"""Measured costs of computing and loading."""

from __future__ import annotations

import pytest

from rakv_cluster.reuse.costs import Costs
from rakv_cluster.types import Tier

MEGABYTE = 1_000_000


def test_a_prompt_that_seemed_to_take_no_time_teaches_nothing() -> None:
    costs = Costs(step_tokens=16)

    costs.observe_prefill(0, 8, 0.0)
    costs.observe_prefill(0, 8, 4.0)

    assert costs.view(0.0).prefill_rate_ms(8, 0) == 0.5


def stuck(times: int) -> tuple[Costs, float]:
    """Costs of a disk whose loads of a megabyte were given up after a second, and the time."""
    costs, now_s = Costs(step_tokens=16), 0.0
    for _ in range(times):
        costs.observe_stuck_load(Tier.DISK, MEGABYTE, 1_000.0, now_s)
        now_s += 1.0
    return costs, now_s - 1.0


def test_a_load_that_was_given_up_is_believed_at_once() -> None:
    costs, now_s = stuck(1)

    assert costs.view(now_s).load_ms(Tier.DISK, MEGABYTE) == pytest.approx(1_000.0)
    assert costs.view(now_s).load_ms(Tier.RAM, MEGABYTE) < 1.0


def test_a_shorter_wait_does_not_make_it_look_faster() -> None:
    costs, now_s = stuck(1)

    costs.observe_stuck_load(Tier.DISK, MEGABYTE, 10.0, now_s)

    assert costs.view(now_s).load_ms(Tier.DISK, MEGABYTE) == pytest.approx(1_000.0)


@pytest.mark.parametrize(("times", "half_life_s"), [(1, 60.0), (2, 120.0), (3, 240.0)])
def test_each_further_one_is_forgotten_half_as_soon(times: int, half_life_s: float) -> None:
    costs, now_s = stuck(times)

    later = costs.view(now_s + half_life_s).load_ms(Tier.DISK, MEGABYTE)

    assert later == pytest.approx(500.0, rel=0.01)


def test_a_load_that_arrives_ends_the_row() -> None:
    costs, now_s = stuck(3)

    costs.observe_load(Tier.DISK, MEGABYTE, 1_000.0, now_s)

    later = costs.view(now_s + 60.0).load_ms(Tier.DISK, MEGABYTE)
    assert later == pytest.approx(500.0, rel=0.01)
