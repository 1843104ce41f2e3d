"""How measured times become a row plan, and that every kernel computes the same product."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from rakv_cluster.model.linear import (
    MEASURED_ROWS,
    PLAIN_ROWS,
    Costs,
    Kernel,
    Linear,
    RowChoice,
    RowPlan,
    measure_costs,
    pack_all,
    plan_rows,
    usable_kernels,
)


def costs(**arms: list[float]) -> Costs:
    """Costs at 1, 2, 4 and 8 rows by kernel name."""
    return {
        Kernel(name): dict(zip((1, 2, 4, 8), times, strict=True)) for name, times in arms.items()
    }


def test_one_kernel_that_wins_everywhere_needs_no_choices() -> None:
    plan = plan_rows(costs(plain=[4, 8, 9, 9], packed=[1, 1, 1, 1]))
    assert plan == RowPlan((), Kernel.PACKED)
    assert str(plan) == "packed"


def test_one_row_is_padded_where_two_are_cheaper() -> None:
    plan = plan_rows(costs(plain=[4, 8, 9, 9], weight_first=[4, 2, 8, 9], packed=[3, 3, 3, 3]))
    assert plan.choose(1) == RowChoice(2, 2, Kernel.WEIGHT_FIRST)
    assert plan.choose(2) == RowChoice(2, 2, Kernel.WEIGHT_FIRST)
    assert plan.choose(3) == RowChoice(3, 3, Kernel.PACKED)
    assert plan.choose(500).kernel is Kernel.PACKED
    assert str(plan) == "2:weight_first@2,packed"


def test_rows_between_measured_counts_do_as_the_next_one_does() -> None:
    plan = plan_rows(costs(plain=[1, 2, 9, 4]))
    assert [plan.choose(rows).min_rows for rows in (1, 2, 3, 4, 5, 8)] == [1, 1, 8, 8, 5, 8]


def test_a_win_within_the_noise_does_not_change_the_kernel() -> None:
    plan = plan_rows(costs(packed=[1.1, 1.1, 1.1, 1.1], plain=[1.0, 1.0, 1.0, 1.0]))
    assert plan == RowPlan((), Kernel.PACKED)


def test_equal_plans_have_equal_names_and_different_ones_differ() -> None:
    fast = costs(weight_first=[4, 1, 8, 9], packed=[3, 3, 3, 3])
    slow = costs(weight_first=[4, 3, 8, 9], packed=[3, 3, 3, 3])
    assert str(plan_rows(fast)) == str(plan_rows(fast))
    assert str(plan_rows(fast)) != str(plan_rows(slow))


def test_the_plain_plan_leaves_rows_alone() -> None:
    assert PLAIN_ROWS.choose(7) == RowChoice(7, 7, Kernel.PLAIN)


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 33, 100])
def test_every_kernel_computes_the_product(kernel: Kernel, bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = Linear(
        torch.randn(96, 64, generator=generator),
        torch.randn(96, generator=generator) if bias else None,
    )
    weight.pack()
    x = torch.randn(rows, 64, generator=generator)
    expected = linear(x, weight.weight, weight.bias)
    torch.testing.assert_close(weight.apply(x, kernel), expected, rtol=1e-5, atol=1e-5)


def test_copies_over_the_budget_are_not_made_and_the_product_still_works() -> None:
    weights = [Linear(torch.randn(8, 8)), Linear(torch.randn(64, 8))]
    total = sum(weight.nbytes for weight in weights)
    assert not pack_all(weights, total - 1)
    assert [weight.packed for weight in weights] == [None, None]
    x = torch.randn(3, 8)
    assert torch.equal(weights[1].apply(x, Kernel.PACKED), linear(x, weights[1].weight))
    assert pack_all(weights, total)


def test_a_kernel_that_computes_something_else_is_not_usable() -> None:
    weight = Linear(torch.randn(32, 32))
    weight.pack()
    assert usable_kernels(weight) == set(Kernel)
    other = Linear(torch.randn(32, 32))
    other.pack()
    weight.packed = other.packed
    assert usable_kernels(weight) == {Kernel.PLAIN, Kernel.WEIGHT_FIRST}


def test_costs_are_measured_for_every_row_count_and_threads_stay_as_they_were() -> None:
    layers = [[Linear(torch.randn(16, 8)), Linear(torch.randn(8, 16))] for _ in range(3)]
    threads = torch.get_num_threads()
    measured = measure_costs(
        layers, Linear(torch.randn(40, 8)), frozenset({Kernel.PLAIN, Kernel.WEIGHT_FIRST})
    )
    assert set(measured) == {Kernel.PLAIN, Kernel.WEIGHT_FIRST}
    assert all(tuple(times) == MEASURED_ROWS for times in measured.values())
    assert all(0 <= ms < 10 for times in measured.values() for ms in times.values())
    assert torch.get_num_threads() == threads
