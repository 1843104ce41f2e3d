"""A circuit breaker: after repeated failures a peer is left alone for a while.

Without it every lookup would pay the deadline of a dead or stalled peer again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rakv_cluster.clock import Clock


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """``failures`` in a row open the breaker for ``cooldown_s``, doubled up to the maximum."""

    failures: int = 3
    cooldown_s: float = 1.0
    max_cooldown_s: float = 8.0


class BreakerState(str, Enum):
    """``PROBING``: the cool-down is over and one call is out to see whether the peer answers."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class CircuitBreaker:
    """Decides whether a peer may be called. Not thread-safe: its owner locks.

    Every call that :meth:`allow` lets through must be answered by :meth:`success` or
    :meth:`failure`.
    """

    def __init__(self, limits: BreakerLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._failures = 0
        self._cooldown_s = limits.cooldown_s
        self._rest_until_s = 0.0
        self.state = BreakerState.CLOSED

    @property
    def resting(self) -> bool:
        """Whether :meth:`allow` would say no."""
        closed = self.state is BreakerState.CLOSED
        return not closed and self._clock.monotonic_s() < self._rest_until_s

    def allow(self) -> bool:
        """Whether to call now. After the cool-down, true once: that call is the probe."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.resting:
            return False
        self.state = BreakerState.PROBING
        # A probe whose outcome is never reported must not block the peer for ever.
        self._rest_until_s = self._clock.monotonic_s() + self._limits.max_cooldown_s
        return True

    def success(self) -> None:
        """The peer answered: calls flow again, and a later opening starts with a short rest."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._cooldown_s = self._limits.cooldown_s

    def failure(self) -> None:
        """The peer failed or was late. A failed probe, or one failure too many, opens."""
        self._failures += 1
        if self.state is BreakerState.CLOSED and self._failures < self._limits.failures:
            return
        if self.state is not BreakerState.OPEN:
            self._rest_until_s = self._clock.monotonic_s() + self._cooldown_s
            self._cooldown_s = min(self._cooldown_s * 2, self._limits.max_cooldown_s)
        self.state = BreakerState.OPEN
