"""No window shows more than what was in stock and what was refilled in it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.errors import RateLimited
from rakv_cluster.serving.keys import TenantLimits
from rakv_cluster.serving.limits import TenantMeter, TokenBucket

GAPS = st.lists(st.floats(0, 30), min_size=1, max_size=120)


@given(per_minute=st.integers(1, 50), gaps=GAPS)
def test_requests_never_exceed_stock_plus_refill(per_minute: int, gaps: list[float]) -> None:
    meter = TenantMeter(TenantLimits(requests_per_minute=per_minute), 0.0)
    now_s, admitted = 0.0, 0
    for gap_s in gaps:
        now_s += gap_s
        with contextlib.suppress(RateLimited):
            meter.admit(TenantLimits(requests_per_minute=per_minute), now_s)
            admitted += 1
            meter.release()
        assert admitted <= per_minute * (1 + now_s / 60) + 1e-6


@given(
    per_minute=st.integers(1, 1000),
    costs=st.lists(st.integers(0, 5000), max_size=20),
    gaps=st.lists(st.floats(0, 100), min_size=20, max_size=20),
)
def test_after_the_announced_wait_there_is_room(
    per_minute: int, costs: list[int], gaps: list[float]
) -> None:
    bucket, now_s = TokenBucket(per_minute, 0.0), 0.0
    for cost, gap_s in zip(costs, gaps, strict=False):
        now_s += gap_s
        bucket.charge(now_s, cost)
        now_s += bucket.wait_s(now_s) * (1 + 1e-9) + 1e-6
        assert bucket.wait_s(now_s) == 0.0


@given(cost=st.integers(1, 10_000), back_s=st.floats(0, 1000))
def test_a_clock_that_goes_back_refills_nothing(cost: int, back_s: float) -> None:
    bucket = TokenBucket(60, 1000.0)
    bucket.charge(1000.0, cost)
    before = bucket.wait_s(1000.0)

    assert bucket.wait_s(1000.0 - back_s) == pytest.approx(before)


def test_new_limits_apply_at_once_and_keep_what_runs() -> None:
    meter = TenantMeter(TenantLimits(concurrent=5), 0.0)
    meter.admit(TenantLimits(concurrent=5), 0.0)

    with pytest.raises(RateLimited):
        meter.admit(TenantLimits(concurrent=1), 0.0)
    meter.admit(TenantLimits(), 0.0)
    assert meter.running == 2
