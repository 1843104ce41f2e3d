"""The circuit breaker: when a failing peer is left alone, and how it comes back."""

from __future__ import annotations

from rakv_cluster.cluster.breaker import BreakerLimits, BreakerState, CircuitBreaker
from rakv_cluster.testing import ManualClock

LIMITS = BreakerLimits(failures=3, cooldown_s=1.0, max_cooldown_s=4.0)


def opened(clock: ManualClock) -> CircuitBreaker:
    breaker = CircuitBreaker(LIMITS, clock)
    for _ in range(LIMITS.failures):
        assert breaker.allow()
        breaker.failure()
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(LIMITS, ManualClock())
    for _ in range(5):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.allow()
    for _ in range(3):
        breaker.failure()
    assert not breaker.allow()


def test_after_the_cooldown_exactly_one_call_probes() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(0.9)
    assert not breaker.allow()
    clock.advance(0.2)
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    assert breaker.state is BreakerState.PROBING


def test_a_probe_that_succeeds_closes_it() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(1.1)
    assert breaker.allow()
    breaker.success()
    assert [breaker.allow() for _ in range(3)] == [True, True, True]


def test_failed_probes_double_the_rest_up_to_the_maximum() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    rests = []
    for _ in range(4):
        waited = 0.0
        while not breaker.allow():
            clock.advance(0.5)
            waited += 0.5
        breaker.failure()
        rests.append(waited)
    assert rests == [1.0, 2.0, 4.0, 4.0]


def test_late_failures_of_calls_that_were_out_do_not_prolong_the_rest() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(0.9)
    breaker.failure()
    clock.advance(0.1)
    assert breaker.allow()


def test_a_probe_that_is_never_reported_does_not_block_for_ever() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(1.0)
    assert breaker.allow()
    clock.advance(LIMITS.max_cooldown_s)
    assert breaker.allow()
