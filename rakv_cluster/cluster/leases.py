"""Cluster-wide single flight: who computes a missing record while the others wait.

The owner of a key grants a lease. It ends when its holder gives it back, when the record is
announced, or after its time to live, whichever is first: a holder that dies delays the others by
at most that long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rakv_cluster.clock import Clock


@dataclass(frozen=True, slots=True)
class Lease:
    """Who computes a key, and for how long at most."""

    holder: str
    remaining_s: float


class LeaseTable:
    """Leases on the keys of one partition. Used by one thread.

    Beyond ``max_leases`` every request is granted without being remembered: computing twice is
    cheaper than waiting for a table.
    """

    def __init__(self, clock: Clock, *, max_leases: int = 10_000, max_ttl_s: float = 120.0) -> None:
        self._clock = clock
        self._max_leases = max_leases
        self._max_ttl_s = max_ttl_s
        self._leases: dict[bytes, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def acquire(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> dict[bytes, Lease]:
        """For each key the lease in force; ``holder``'s own where it was granted or renewed."""
        now_s = self._clock.monotonic_s()
        self._expire(now_s)
        ttl_s = min(ttl_s, self._max_ttl_s)
        leases = {}
        for key in keys:
            other, ends_s = self._leases.get(key, (holder, 0.0))
            if other == holder:
                ends_s = now_s + ttl_s
                if key in self._leases or len(self._leases) < self._max_leases:
                    self._leases[key] = (holder, ends_s)
            leases[key] = Lease(other, ends_s - now_s)
        return leases

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """Give back the leases that ``holder`` has on ``keys``."""
        for key in keys:
            if key in self._leases and self._leases[key][0] == holder:
                del self._leases[key]

    def fulfilled(self, keys: Sequence[bytes]) -> None:
        """Records under ``keys`` exist now: nobody needs to wait for them."""
        for key in keys:
            self._leases.pop(key, None)

    def _expire(self, now_s: float) -> None:
        over = [key for key, (_, ends_s) in self._leases.items() if ends_s <= now_s]
        for key in over:
            del self._leases[key]
