"""The planned order reuses the most that any order can."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.batch.planner import plan

WEIGHTS = {"a": 7, "b": 1, "c": 20, "d": 3}
PROMPTS = st.lists(st.lists(st.sampled_from("abcd"), max_size=4).map(tuple), max_size=12)


def common(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    """Weight of the longest common prefix, counted the slow way."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return sum(WEIGHTS[segment] for segment in left[:length])


def adjacent(prompts: list[tuple[str, ...]]) -> int:
    return sum(common(before, after) for before, after in pairwise(prompts))


def with_everything_cached(prompts: list[tuple[str, ...]]) -> int:
    return sum(
        max((common(earlier, prompt) for earlier in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    )


@given(PROMPTS)
def test_the_order_holds_every_prompt_once_and_counts_right(prompts: list[tuple[str, ...]]) -> None:
    planned = plan(prompts, WEIGHTS.__getitem__)

    assert sorted(planned.order) == list(range(len(prompts)))
    assert planned.total == sum(WEIGHTS[s] for prompt in prompts for s in prompt)
    assert planned.reused == adjacent([prompts[i] for i in planned.order])
    assert planned.reused_as_given == adjacent(prompts)


@given(PROMPTS)
def test_one_prompt_of_cache_is_as_good_as_an_unbounded_one(
    prompts: list[tuple[str, ...]],
) -> None:
    assert plan(prompts, WEIGHTS.__getitem__).reused == with_everything_cached(prompts)


@given(PROMPTS.filter(lambda prompts: len(prompts) <= 6))
def test_no_order_reuses_more(prompts: list[tuple[str, ...]]) -> None:
    best = max(adjacent(list(order)) for order in permutations(prompts))

    assert plan(prompts, WEIGHTS.__getitem__).reused == best


def test_branches_keep_the_order_in_which_they_are_given() -> None:
    prompts = ["bx", "ax", "by", "c", "ay", "bx"]

    assert plan(prompts, lambda segment: 1).order == (0, 5, 2, 1, 4, 3)
