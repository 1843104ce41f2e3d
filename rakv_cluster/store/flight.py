"""Single flight: a missing record is computed by one request, and the others may wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Claim:
    """Who computes what: ``mine`` now, ``theirs`` is being computed; seconds until that ends."""

    mine: tuple[bytes, ...]
    theirs: Mapping[bytes, float]


class SingleFlight(Protocol):
    """Leases on keys. Methods may be called from any thread and block for a bounded time.

    Fault contract: a lease that nobody can grant is granted. What is computed twice for that
    reason costs time, never a request.
    """

    def claim(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> Claim:
        """Which of the missing ``keys`` ``holder`` is to compute, and which others do now.

        A lease ends when the record is stored, by :meth:`release`, or after ``ttl_s``; a holder's
        second claim renews it.
        """
        ...

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """Give up leases of a holder that will not store these records; others are ignored."""
        ...


class NoFlight:
    """Everyone computes everything: for one replica alone, and as a baseline."""

    def claim(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> Claim:
        """Grant all."""
        return Claim(tuple(keys), {})

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """Nothing is held."""


NO_FLIGHT = NoFlight()
