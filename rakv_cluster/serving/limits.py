"""How much one tenant may use: token buckets and a count of what runs. No clock is read here."""

from __future__ import annotations

from rakv_cluster.errors import RateLimited
from rakv_cluster.serving.keys import TenantLimits

_WINDOW_S = 60.0


class TokenBucket:
    """``per_minute`` units, refilled evenly, never more than a minute's worth in stock.

    What something costs may be known only afterwards, so the stock may be overdrawn by
    :meth:`charge`; nothing is let in until it is positive again. 0 per minute is no limit.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._stock = float(per_minute)
        self._at_s = now_s

    def wait_s(self, now_s: float, need: float = 0.0) -> float:
        """Seconds until ``need`` units are there (0: until the stock is positive); 0 if now."""
        if not self._per_minute:
            return 0.0
        self._refill(now_s)
        if self._stock > 0 and self._stock >= need:
            return 0.0
        # Against rounding: after this wait the stock must really be above 0.
        return (max(need, 1e-6) - self._stock) * _WINDOW_S / self._per_minute

    def charge(self, now_s: float, units: float) -> None:
        """Take ``units`` out, whether they are there or not."""
        if self._per_minute:
            self._refill(now_s)
            self._stock -= units

    def _refill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._at_s) * self._per_minute / _WINDOW_S
        self._stock = min(float(self._per_minute), self._stock + gained)
        self._at_s = max(self._at_s, now_s)


class TenantMeter:
    """One tenant's use of this ingress."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        self.running = 0
        self._apply(limits, now_s)

    def admit(self, limits: TenantLimits, now_s: float) -> None:
        """Let one request in, to be ended by :meth:`release`; raises :class:`RateLimited`.

        New ``limits`` start with full buckets.
        """
        if limits != self._limits:
            self._apply(limits, now_s)
        if limits.concurrent and self.running >= limits.concurrent:
            raise RateLimited(
                f"{self.running} requests of this tenant are running, its limit", retry_after_s=1.0
            )
        for unit, wait_s in (
            ("requests", self._requests.wait_s(now_s, need=1.0)),
            ("tokens", self._tokens.wait_s(now_s)),
        ):
            if wait_s > 0:
                raise RateLimited(
                    f"this tenant's {unit} per minute are used up", retry_after_s=wait_s
                )
        self._requests.charge(now_s, 1.0)
        self.running += 1

    def charge_tokens(self, count: int, now_s: float) -> None:
        """Book tokens that a request took."""
        self._tokens.charge(now_s, count)

    def release(self) -> None:
        """A request that was let in has ended."""
        self.running -= 1

    def _apply(self, limits: TenantLimits, now_s: float) -> None:
        self._limits = limits
        self._requests = TokenBucket(limits.requests_per_minute, now_s)
        self._tokens = TokenBucket(limits.tokens_per_minute, now_s)
