"""How many replicas the work wants, from what the replicas measure of it.

Serve asks a policy every second or so and applies its own bounds and delays to the answer. Requests
in progress, by which Serve scales, say little here: one may be a cached prompt or a hundred
thousand tokens to compute. Backlog does, in milliseconds of work at the replicas' own measured
costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

BACKLOG_MS = "backlog_ms"
OCCUPANCY = "occupancy"
BUSY_SHARE = "busy_share"

_FULL = 0.8
"""Open requests per slot, or share of its time, from which on a replica counts as full."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """``backlog_ms`` of uncomputed prompts; ``occupancy``: open requests over slots, for decoding
    leaves no backlog; ``busy_share`` of its time of late that prompts took, for replicas that keep
    up leave none either."""

    backlog_ms: float
    occupancy: float
    busy_share: float


def wanted_replicas(loads: Sequence[ReplicaLoad], *, target_backlog_ms: float) -> float:
    """Replicas over which the work would leave each ``target_backlog_ms``, and none full (of open
    requests, or of prompts to compute).

    What is not a finite number above 0 counts as 0: an absurd report must not start replicas.
    """
    backlog = sum(_believed(load.backlog_ms) for load in loads)
    occupied = sum(_believed(load.occupancy) for load in loads)
    busy = sum(min(_believed(load.busy_share), 1.0) for load in loads)
    return max(backlog / target_backlog_ms, occupied / _FULL, busy / _FULL)


class BacklogPolicy:
    """Serve's shell around :func:`wanted_replicas`."""

    def __init__(self, *, target_backlog_ms: float) -> None:
        self._target_backlog_ms = target_backlog_ms

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Wanted replicas and no state. A replica that has not reported is as its peers are."""
        metrics = context.aggregated_metrics or {}
        loads = _loads(metrics)
        current = context.current_num_replicas
        if not loads:
            return current, {}
        wanted = wanted_replicas(loads, target_backlog_ms=self._target_backlog_ms)
        return math.ceil(wanted * max(current, len(loads)) / len(loads)), {}


def _loads(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaLoad]:
    backlogs = metrics.get(BACKLOG_MS, {})
    occupancies, busy_shares = metrics.get(OCCUPANCY, {}), metrics.get(BUSY_SHARE, {})
    return [
        ReplicaLoad(backlogs[each], occupancies.get(each, 0.0), busy_shares.get(each, 0.0))
        for each in backlogs
    ]


def _believed(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
