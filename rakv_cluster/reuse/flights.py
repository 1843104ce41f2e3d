"""When a request asks whether its cold prefix is being computed elsewhere, and what it does then.

A request claims the first of its cold chunks, and the others only once it has that one. So who
waits holds no lease: no two requests wait for each other, and none computes, chunk by chunk, what
another one is about to.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rakv_cluster.errors import ConfigError
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.planner import ReusePlan
from rakv_cluster.store.flight import SingleFlight
from rakv_cluster.types import Chunk, ChunkedPrompt

log = logging.getLogger(__name__)

_COMPUTE_FACTOR = 2.0
"""A lease outlives the expected computing by this: other streams share the steps."""


@dataclass(frozen=True, slots=True)
class FlightLimits:
    """Bounds of single flight.

    A prefix that takes less than ``min_compute_ms`` to compute is not asked about. A lease lasts
    twice as long as computing should, plus ``slack_s`` for storing. A request waits for two lives
    of a lease, so that one holder may die, and never for more than ``longest_s``. It looks again
    every ``poll_s``.
    """

    min_compute_ms: float = 1000.0
    slack_s: float = 1.0
    longest_s: float = 30.0
    poll_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("min_compute_ms", "slack_s", "longest_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative", field=name)
        if self.poll_s <= 0:
            raise ConfigError("poll_s must be positive", field="poll_s")

    def lease_s(self, compute_ms: float) -> float:
        """Lifetime of a lease on what takes ``compute_ms``."""
        return min(self.longest_s, _COMPUTE_FACTOR * compute_ms / 1e3 + self.slack_s)


@dataclass(frozen=True, slots=True)
class Departure:
    """What a request does about its cold prefix.

    ``claimed`` are the chunks it is to compute (it may hold leases on them). ``wait_s`` above 0:
    another request computes the first one now; look again soon, for so long at most.
    """

    claimed: tuple[Chunk, ...] = ()
    wait_s: float = 0.0


def cold_chunks(
    prompt: ChunkedPrompt, plan: ReusePlan, *, have: int, prompt_tokens: int
) -> tuple[Chunk, ...]:
    """Complete chunks among the first ``prompt_tokens`` that are neither loaded nor stored."""
    covered = max([have, *(load.end for load in plan.loads)])
    return tuple(
        chunk
        for chunk in prompt.chunks
        if covered < chunk.end <= prompt_tokens and chunk.prefix_key not in plan.stored_keys
    )


def depart(
    cold: Sequence[Chunk], costs: CostView, flight: SingleFlight, limits: FlightLimits, holder: str
) -> Departure:
    """Claim cold chunks that are worth it. Never raises: without an answer they are computed."""
    if not cold:
        return Departure()
    compute_ms = costs.prefill_ms(cold[0].start, cold[-1].end)
    if compute_ms < limits.min_compute_ms:
        return Departure()
    lease_s = limits.lease_s(compute_ms)
    keys = [chunk.prefix_key for chunk in cold]
    try:
        if flight.claim(keys[:1], holder, lease_s).theirs:
            return Departure(wait_s=min(2 * lease_s, limits.longest_s))
        if keys[1:]:
            flight.claim(keys[1:], holder, lease_s)
    except Exception:  # the boundary to any store: an error is a lease
        log.warning("single flight failed in claim; computing", exc_info=True)
    return Departure(claimed=tuple(cold))


def give_up(chunks: Sequence[Chunk], flight: SingleFlight, holder: str) -> None:
    """Release leases on chunks that will not be stored. Never raises: they end by themselves."""
    try:
        flight.release([chunk.prefix_key for chunk in chunks], holder)
    except Exception:  # the boundary to any store: a lease has an end of its own
        log.warning("single flight failed in release", exc_info=True)
