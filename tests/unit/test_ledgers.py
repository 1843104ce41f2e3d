"""What a step may cost above a plain one, and when that will be enough."""

from __future__ import annotations

import math

import pytest

from rakv_cluster.speculation.governor import (
    WINDOW_SHARE,
    GovernorMode,
    GovernorSettings,
    ReplicaLedger,
    RequestLedger,
    allowance_ms,
    charge,
    steps_until,
)

BASE_MS = 20.0


def allowed(
    ledger: RequestLedger, mode: GovernorMode = GovernorMode.BUCKET, debt_ms: float = 0.0
) -> float:
    return allowance_ms(
        GovernorSettings(mode), indebted(debt_ms), [ledger], base_ms=BASE_MS, batch=1
    )


def indebted(ms: float) -> ReplicaLedger:
    replica = ReplicaLedger()
    replica.book(plain_ms=BASE_MS, overspend_ms=ms, tokens=1)
    return replica


def test_a_request_may_spend_at_once_what_its_sure_length_allows() -> None:
    ledger = RequestLedger(plain_ms=30.0, likely_ms=30.0 + 40 * BASE_MS)

    assert allowed(ledger) == pytest.approx(0.05 * (30.0 + 40 * BASE_MS))
    ledger.overspend_ms = 40.0
    assert allowed(ledger) == pytest.approx(0.05 * (30.0 + 40 * BASE_MS) - 40.0)


def test_a_request_that_outlives_its_sure_length_earns_as_it_goes() -> None:
    ledger = RequestLedger(plain_ms=50 * BASE_MS, likely_ms=10 * BASE_MS)

    assert allowed(ledger) == pytest.approx(0.05 * 51 * BASE_MS)


def test_strict_counts_only_what_has_passed() -> None:
    ledger = RequestLedger(plain_ms=30.0, likely_ms=30.0 + 40 * BASE_MS)

    assert allowed(ledger, GovernorMode.STRICT) == pytest.approx(0.01 * (30.0 + BASE_MS))


def test_what_is_sure_of_one_request_does_not_lift_the_replicas_bound() -> None:
    ledger = RequestLedger(likely_ms=10_000 * BASE_MS)

    assert allowed(ledger, debt_ms=8 * BASE_MS) == pytest.approx(BASE_MS)


@pytest.mark.parametrize("mode", [GovernorMode.BUCKET, GovernorMode.STRICT])
@pytest.mark.parametrize("likely_ms", [0.0, 600.0])
@pytest.mark.parametrize("debt_ms", [0.0, 179.0])
def test_after_so_many_plain_steps_there_is_enough_and_not_before(
    mode: GovernorMode, likely_ms: float, debt_ms: float
) -> None:
    settings, needed_ms = GovernorSettings(mode), 2.5
    replica = indebted(debt_ms)
    ledger = RequestLedger(plain_ms=100.0, overspend_ms=40.0, likely_ms=likely_ms)
    steps = math.ceil(
        steps_until(settings, replica, [ledger], base_ms=BASE_MS, batch=1, needed_ms=needed_ms)
    )

    seen = []
    for _ in range(steps + 1):
        seen.append(allowance_ms(settings, replica, [ledger], base_ms=BASE_MS, batch=1))
        charge(
            settings, replica, [ledger], base_ms=BASE_MS, spent_ms=BASE_MS, plain_steps=[1]
        )  # fmt: skip

    assert steps > 1
    assert seen[steps] >= needed_ms - 1e-9
    late = 31 if debt_ms and mode is GovernorMode.BUCKET else 0  # windows are over together
    assert all(ms < needed_ms for ms in seen[: steps - late])


def test_without_a_governor_there_is_nothing_to_wait_for() -> None:
    ledger = RequestLedger(overspend_ms=1_000.0)
    settings = GovernorSettings(GovernorMode.THROUGHPUT)

    assert allowed(ledger, GovernorMode.THROUGHPUT) == math.inf
    assert (
        steps_until(settings, ReplicaLedger(), [ledger], base_ms=BASE_MS, batch=1, needed_ms=1.0)
        == 0
    )


QUICK_TOKENS = 1_024


def lost_in_slow_steps(tokens: int) -> ReplicaLedger:
    """Quick tokens, then some of 100 ms that lose 3 ms each."""
    replica = ReplicaLedger()
    for _ in range(QUICK_TOKENS):
        replica.book(plain_ms=BASE_MS, overspend_ms=0.0, tokens=1)
    for _ in range(tokens):
        replica.book(plain_ms=5 * BASE_MS, overspend_ms=3.0, tokens=1)
    return replica


def test_a_windows_plain_time_is_what_its_tokens_took() -> None:
    left_ms = lost_in_slow_steps(100).left_ms(BASE_MS)

    # The window that began in front of the slow ones: 100 of 100 ms, 900 of 20 ms to come.
    exact_ms = WINDOW_SHARE * (100 * 100.0 + 900 * BASE_MS) - 100 * 3.0
    assert exact_ms < 0  # of quick tokens alone it would be 120 ms less
    assert exact_ms - WINDOW_SHARE * 32 * 100.0 <= left_ms <= exact_ms


def test_while_steps_are_slow_no_more_is_lost_than_quick_ones_can_afford() -> None:
    replica = lost_in_slow_steps(20)

    assert replica.left_ms(100.0) == replica.left_ms(BASE_MS)


def test_what_was_gained_before_is_not_to_be_lost_again() -> None:
    replica = lost_in_slow_steps(10)
    replica.book(plain_ms=BASE_MS, overspend_ms=-5_000.0, tokens=1)

    assert replica.left_ms(BASE_MS) == pytest.approx(9 * BASE_MS)


def test_a_loss_counts_until_every_window_with_it_is_over() -> None:
    replica = ReplicaLedger()
    replica.book(plain_ms=BASE_MS, overspend_ms=100.0, tokens=1)
    left = []
    for _ in range(1_100):
        replica.book(plain_ms=BASE_MS, overspend_ms=0.0, tokens=1)
        left.append(replica.left_ms(BASE_MS))

    assert all(ms == pytest.approx(80.0) for ms in left[:999])
    assert left[-1] == pytest.approx(180.0, abs=WINDOW_SHARE * 32 * BASE_MS)
