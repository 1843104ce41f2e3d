"""When a request asks whether its cold prefix is being computed elsewhere, and what it does then.

A request claims the first of its cold chunks, looks into the store once more, since a lease may be
free because its record has just come, and claims the others only if the first is cold all the same.
So who waits holds no lease: no two requests wait for each other, and none computes, chunk by chunk,
what another one is about to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rakv_cluster.errors import ConfigError
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.planner import ReusePlan
from rakv_cluster.store.flight import SingleFlight
from rakv_cluster.types import Chunk, ChunkedPrompt

log = logging.getLogger(__name__)

_COMPUTE_FACTOR = 2.0
"""A lease outlives the expected computing by this: other streams share the steps."""
RENEW_SHARE = 0.5
"""Who still computes renews a lease after this share of its life."""


@dataclass(frozen=True, slots=True)
class FlightLimits:
    """Bounds of single flight.

    A prefix that takes less than ``min_compute_ms`` to compute is not asked about, unless the
    request has waited for another part of it. A lease lasts twice as long as computing should, plus
    ``slack_s`` for storing; it is renewed while its holder computes and ends by itself with it. No
    request waits longer than ``longest_s`` altogether. It looks again every ``poll_s``.
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

    ``claimed`` are the chunks it is to compute (it may hold leases of ``lease_s`` on them).
    ``waits``: another request computes the first one now; look again soon.
    """

    claimed: tuple[Chunk, ...] = ()
    lease_s: float = 0.0
    waits: bool = False


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


@dataclass(frozen=True, slots=True)
class Claimant:
    """A request that is about to compute what it does not find.

    ``holder`` names it to the owners of leases. ``has_waited``: it waited for another part of its
    prefix before, and does so for the rest however little it is.
    """

    flight: SingleFlight
    limits: FlightLimits
    holder: str
    has_waited: bool = False

    def depart(
        self,
        plan: ReusePlan,
        look: Callable[[], ReusePlan],
        cold: Callable[[ReusePlan], tuple[Chunk, ...]],
        costs: CostView,
    ) -> tuple[ReusePlan, Departure]:
        """Claim what of ``plan`` is ``cold``; the plan that holds after that, and what to do.

        Between a look and a claim the holder's record may come, which ends its lease: what is
        granted then is there. So each claim is followed by another look, and the claim counts if
        that finds no more than the one before. Every round but the last finds a chunk more. Raises
        what ``look`` raises; without an answer from the flight all is computed.
        """
        chunks = cold(plan)
        for _ in chunks:
            if not chunks:
                return plan, Departure()
            compute_ms = costs.prefill_ms(chunks[0].start, chunks[-1].end)
            if compute_ms < self.limits.min_compute_ms and not self.has_waited:
                return plan, Departure()
            lease_s = self.limits.lease_s(compute_ms)
            if not self._granted(chunks[:1], lease_s):
                return plan, Departure(waits=True)
            plan = look()
            still_cold = cold(plan)
            if still_cold[:1] == chunks[:1]:
                self._granted(still_cold[1:], lease_s)
                return plan, Departure(still_cold, lease_s)
            give_up(chunks[:1], self.flight, self.holder)
            chunks = still_cold
        return plan, Departure(waits=bool(chunks))

    def renew(self, chunks: Sequence[Chunk], lease_s: float) -> None:
        """Keep the leases on ``chunks`` for as long again. Never raises."""
        self._granted(chunks, lease_s)

    def _granted(self, chunks: Sequence[Chunk], lease_s: float) -> bool:
        """Whether nobody else computes any of ``chunks``, as far as one can know."""
        if not chunks:
            return True
        try:
            keys = [chunk.prefix_key for chunk in chunks]
            return not self.flight.claim(keys, self.holder, lease_s).theirs
        except Exception:  # the boundary to any store: an error is a lease
            log.warning("single flight failed in claim; computing", exc_info=True)
            return True


def give_up(chunks: Sequence[Chunk], flight: SingleFlight, holder: str) -> None:
    """Release leases on chunks that will not be stored. Never raises: they end by themselves."""
    try:
        flight.release([chunk.prefix_key for chunk in chunks], holder)
    except Exception:  # the boundary to any store: a lease has an end of its own
        log.warning("single flight failed in release", exc_info=True)
