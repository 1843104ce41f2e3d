"""How many replicas the work wants."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from rakv_cluster.config import Settings
from rakv_cluster.routing.autoscaling import (
    BACKLOG_MS,
    BUSY_SHARE,
    OCCUPANCY,
    BacklogPolicy,
    ReplicaLoad,
    wanted_replicas,
)


def wanted(*loads: tuple[float, float, float]) -> float:
    return wanted_replicas([ReplicaLoad(*load) for load in loads], target_backlog_ms=1000.0)


def test_backlog_is_spread_to_the_target() -> None:
    assert wanted((4000.0, 0.1, 1.0), (500.0, 0.1, 1.0)) == pytest.approx(4.5)


def test_full_replicas_want_company_without_any_backlog() -> None:
    assert wanted((0.0, 1.6, 0.1), (0.0, 0.8, 0.1)) == pytest.approx(3.0)


def test_idle_replicas_want_none() -> None:
    assert wanted((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)) == 0


def test_replicas_that_keep_up_are_not_given_up_for_having_no_backlog() -> None:
    assert wanted((100.0, 0.2, 0.7), (100.0, 0.2, 0.7)) == pytest.approx(1.75)
    assert wanted((0.0, 0.2, 9.0)) == pytest.approx(1.25)  # a cost that a stall made look high


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1e9])
def test_absurd_reports_start_nothing(absurd: float) -> None:
    assert wanted((absurd, absurd, absurd), (1000.0, 0.1, 0.1)) == pytest.approx(1.0)


def context(metrics: dict[str, dict[str, float]] | None, current: int) -> Any:
    return SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=current)


class TestPolicy:
    def test_no_reports_no_change(self) -> None:
        policy = BacklogPolicy(target_backlog_ms=1000.0)
        assert policy(context(None, 3)) == (3, {})
        assert policy(context({}, 2)) == (2, {})

    def test_silent_replicas_are_taken_to_be_like_the_others(self) -> None:
        metrics = {BACKLOG_MS: {"a": 3000.0}, OCCUPANCY: {"a": 0.5}, BUSY_SHARE: {"a": 1.0}}
        replicas, _ = BacklogPolicy(target_backlog_ms=1000.0)(context(metrics, 2))
        assert replicas == 6


def test_more_replicas_at_most_than_at_least() -> None:
    with pytest.raises(ValueError, match="max_replicas"):
        Settings(replicas=3, max_replicas=2)
    assert Settings(replicas=2, max_replicas=2, threads=1).threads_per_replica == 1
