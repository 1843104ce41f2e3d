"""The scheduler's promises, on views of a state without any engine behind them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.engine.scheduler import (
    Candidate,
    StepLimits,
    TenantShares,
    Waiter,
    choose_victim,
    next_admission,
    plan_step,
)
from rakv_cluster.reuse.costs import Costs, CostView

TENANTS = ("a", "b", "c")
MAX_RUNNING = 6


def costs(decode_ms: float = 30.0, prefill_ms_per_token: float = 1.5) -> CostView:
    measured = Costs(step_tokens=512)
    measured.observe_decode(1, decode_ms)
    measured.observe_prefill(0, 64, 64 * prefill_ms_per_token)
    return measured.view(0.0)


candidates = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.integers(0, 4000), st.integers(1, 3000), st.booleans()),
    min_size=1,
    max_size=MAX_RUNNING,
).map(
    lambda rows: [
        Candidate(arrival, tenant, position, remaining, streaming and remaining == 1)
        for arrival, (tenant, position, remaining, streaming) in enumerate(rows)
    ]
)
limits = st.builds(
    StepLimits,
    max_step_tokens=st.integers(MAX_RUNNING, 512),
    min_prefill_tokens=st.integers(1, 32),
    gap_factor=st.floats(1.0, 5.0),
)
served = st.dictionaries(st.sampled_from(TENANTS), st.floats(0, 1e6))


@given(candidates, served, limits)
def test_a_step_is_within_its_budget_and_leaves_nobody_with_one_token_out(
    waiting: list[Candidate], usage: dict[str, float], bounds: StepLimits
) -> None:
    shares = plan_step(waiting, usage, bounds, costs())

    by_arrival = {share.arrival: share.tokens for share in shares}
    assert len(by_arrival) == len(shares)
    assert sum(by_arrival.values()) <= bounds.max_step_tokens
    for each in waiting:
        granted = by_arrival.get(each.arrival, 0)
        assert 0 <= granted <= each.remaining
        if each.remaining == 1:
            assert granted == 1


@given(candidates, served, limits)
def test_the_oldest_prompt_gets_at_least_half_of_the_prompt_tokens(
    waiting: list[Candidate], usage: dict[str, float], bounds: StepLimits
) -> None:
    shares = plan_step(waiting, usage, bounds, costs())

    prompts = [each for each in waiting if each.remaining > 1]
    granted = {share.arrival: share.tokens for share in shares}
    if prompts:
        oldest = prompts[0]
        total = sum(granted.get(each.arrival, 0) for each in prompts)
        assert granted[oldest.arrival] >= min(oldest.remaining, total / 2)
        assert granted[oldest.arrival] >= 1


@given(candidates, limits.filter(lambda bounds: bounds.max_step_tokens >= 64))
def test_every_prompt_is_computed_in_bounded_time(
    waiting: list[Candidate], bounds: StepLimits
) -> None:
    """No starvation: each step advances the oldest, so all finish."""
    tokens = sum(each.remaining for each in waiting)
    for _ in range(tokens):
        shares = plan_step(waiting, {}, bounds, costs())
        granted = {share.arrival: share.tokens for share in shares}
        moved = [
            replace(
                each,
                position=each.position + granted.get(each.arrival, 0),
                remaining=each.remaining - granted.get(each.arrival, 0),
            )
            for each in waiting
        ]
        waiting = [each for each in moved if each.remaining]
        if not waiting:
            break
    assert not waiting


@given(st.floats(5, 200), st.floats(0.1, 10), st.integers(1, 5), st.integers(200, 5000), limits)
def test_a_prompt_beside_streams_keeps_the_step_within_the_gap(
    decode_ms: float, rate_ms: float, streams: int, prompt: int, bounds: StepLimits
) -> None:
    known = costs(decode_ms, rate_ms)
    running = [Candidate(number, "a", 100, 1, True) for number in range(streams)]

    shares = plan_step([*running, Candidate(9, "a", 0, prompt, False)], {}, bounds, known)

    tokens = shares[-1].tokens
    limit_ms = bounds.gap_factor * known.decode_ms(streams)
    fits = known.decode_ms(streams) + tokens * known.prefill_rate_ms(tokens, 0) <= limit_ms
    assert fits or tokens <= bounds.min_prefill_tokens


def test_what_was_too_slow_at_this_context_is_not_granted_for_being_quick_at_another() -> None:
    bounds = StepLimits(
        max_step_tokens=512, min_prefill_tokens=8, gap_factor=3.0, background_step_tokens=32
    )
    measured = Costs(step_tokens=512)
    measured.observe_decode(1, 14.0)
    for rows in (16, 32, 64):
        measured.observe_prefill(0, rows, 0.8 * rows)
    measured.observe_prefill(2000, 32, 62.0)

    candidates = [Candidate(0, "a", 100, 1, True), Candidate(1, "a", 2000, 4000, False)]
    tokens = plan_step(candidates, {}, bounds, measured.view(0.0))[-1].tokens

    assert 8 <= tokens <= 28 / (62 / 32)


def test_a_prompt_gets_all_that_fits_by_what_as_many_tokens_cost() -> None:
    bounds = StepLimits(
        max_step_tokens=512, min_prefill_tokens=8, gap_factor=3.0, background_step_tokens=32
    )
    measured = Costs(step_tokens=512)
    measured.observe_decode(1, 14.0)
    measured.observe_prefill(3000, 10, 25.0)
    measured.observe_prefill(3000, 16, 40.0)

    candidates = [Candidate(0, "a", 100, 1, True), Candidate(1, "a", 3000, 4000, False)]
    tokens = plan_step(candidates, {}, bounds, measured.view(0.0))[-1].tokens

    assert tokens == 11  # 28 ms of room, 2.5 each


def test_without_streams_a_prompt_gets_the_whole_step() -> None:
    bounds = StepLimits(
        max_step_tokens=512, min_prefill_tokens=16, gap_factor=3.0, background_step_tokens=32
    )

    (share,) = plan_step([Candidate(0, "a", 0, 4000, False)], {}, bounds, costs())

    assert share.tokens == 512


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    bounds = StepLimits(
        max_step_tokens=100, min_prefill_tokens=16, gap_factor=3.0, background_step_tokens=32
    )
    prompts = [Candidate(0, "a", 0, 4000, False), Candidate(1, "a", 0, 40, False)]

    shares = {share.arrival: share.tokens for share in plan_step(prompts, {}, bounds, costs())}

    assert shares == {0: 60, 1: 40}


def test_spare_prompt_tokens_go_to_the_tenant_served_least() -> None:
    bounds = StepLimits(
        max_step_tokens=100, min_prefill_tokens=16, gap_factor=3.0, background_step_tokens=32
    )
    prompts = [Candidate(n, t, 0, 4000, False) for n, t in enumerate("aab")]

    shares = plan_step(prompts, {"a": 500.0, "b": 10.0}, bounds, costs())

    assert {share.arrival: share.tokens for share in shares} == {0: 50, 2: 50}


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), min_size=1), served)
def test_admission_prefers_preempted_then_least_served_then_oldest(
    rows: list[tuple[str, bool]], usage: dict[str, float]
) -> None:
    waiters = [Waiter(number, tenant, preempted) for number, (tenant, preempted) in enumerate(rows)]

    chosen = waiters[next_admission(waiters, usage)]

    if any(waiter.preempted for waiter in waiters):
        assert chosen.arrival == min(w.arrival for w in waiters if w.preempted)
    else:
        least = min(usage.get(waiter.tenant, 0.0) for waiter in waiters)
        assert usage.get(chosen.tenant, 0.0) == least
        peers = [w.arrival for w in waiters if usage.get(w.tenant, 0.0) == least]
        assert chosen.arrival == min(peers)


@given(st.sets(st.integers(0, 50)), st.integers(0, 50))
def test_the_oldest_is_never_preempted_for_another(arrivals: set[int], needy: int) -> None:
    victim = choose_victim(sorted(arrivals), needy)

    assert victim >= needy


def test_backlogged_tenants_get_equal_shares_and_idling_earns_none() -> None:
    shares = TenantShares()
    shares.enter("busy")
    shares.charge("busy", 10_000)

    shares.enter("late")

    assert shares.served["late"] == 10_000


def test_tenants_without_open_requests_are_forgotten() -> None:
    shares = TenantShares()
    for number in range(100):
        shares.enter(f"tenant-{number}")
        shares.leave(f"tenant-{number}")

    assert not shares.served
