"""What speculation may lose against K=0, and the ledgers that prove it.

*Overspend* is time above what plain decoding would have taken for the same tokens, negative where
drafts paid. Two ledgers, both in ms:

- the replica's debt, a token bucket turned upside down: every step adds its overspend and pays
  back ``refill`` of the plain time of the tokens it emitted; debt never falls below zero (gains
  are not saved up) and a step may not be able to lift it above ``capacity_tokens`` plain tokens.
  So over any window, overspend <= refill x plain time + capacity (0.5% + 4 tokens; with one more
  for what no prediction foresaw, 1% of 1,000).
- each request's, against its own plain time with prefill included: what a client sees. The plain
  time of the tokens that its answer is sure to reach counts from the start (``sure_ms``; not in
  ``strict``): drafts that pay later have to be bought first.

Charged are measured times. The bounds hold as far as a step's cost is predicted: a surprise is
charged in full and paid back before the next draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class GovernorMode(str, Enum):
    """``bucket``: replica and request bounds; ``strict``: a tighter one for every request;
    ``throughput``: none."""

    BUCKET = "bucket"
    STRICT = "strict"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class GovernorSettings:
    """Shares are of plain time; ``capacity_tokens`` is in plain tokens' time.

    ``strict_reserve`` is the share by which a strict request's step may take longer than predicted
    without breaking its bound.
    """

    mode: GovernorMode = GovernorMode.BUCKET
    capacity_tokens: float = 4.0
    refill_share: float = 0.005
    request_share: float = 0.05
    strict_share: float = 0.01
    strict_reserve: float = 0.05

    @property
    def share(self) -> float:
        """What a request may lose."""
        return self.strict_share if self.mode is GovernorMode.STRICT else self.request_share

    def counted_ms(self, ledger: RequestLedger, base_ms: float) -> float:
        """Plain time that a request's share is taken of, where its next token takes ``base_ms``."""
        passed_ms = ledger.plain_ms + base_ms
        return passed_ms if self.mode is GovernorMode.STRICT else max(passed_ms, ledger.sure_ms)

    @property
    def reserve(self) -> float:
        """Share of a step's predicted time that is held back for surprises."""
        return self.strict_reserve if self.mode is GovernorMode.STRICT else 0.0


@dataclass(slots=True)
class RequestLedger:
    """One request's overspend and the plain time it is measured against, prefill included.

    ``sure_ms`` of plain time will have passed in all likelihood before it ends.
    """

    plain_ms: float = 0.0
    overspend_ms: float = 0.0
    sure_ms: float = 0.0


@dataclass(slots=True)
class ReplicaLedger:
    """The bucket's debt, and totals since start for the report."""

    debt_ms: float = 0.0
    plain_ms: float = 0.0
    overspend_ms: float = 0.0


def allowance_ms(
    settings: GovernorSettings,
    replica: ReplicaLedger,
    requests: Sequence[RequestLedger],
    *,
    base_ms: float,
    batch: int,
) -> float:
    """Most that the next step may cost above ``base_ms``, the plain step of ``batch`` sequences.

    Every one of them waits for the whole step, whoever drafts in it: so each request's own bound
    counts. May be negative; infinite without a governor.
    """
    if settings.mode is GovernorMode.THROUGHPUT:
        return math.inf
    bounds = [
        settings.share * settings.counted_ms(ledger, base_ms) - ledger.overspend_ms
        for ledger in requests
    ]
    if settings.mode is GovernorMode.BUCKET:
        bounds.append(settings.capacity_tokens * base_ms / batch - replica.debt_ms)
    return min(bounds, default=math.inf)


def steps_until(
    settings: GovernorSettings,
    replica: ReplicaLedger,
    requests: Sequence[RequestLedger],
    *,
    base_ms: float,
    batch: int,
    needed_ms: float,
) -> float:
    """Plain steps of ``batch`` sequences after which :func:`allowance_ms` will be ``needed_ms``; 0
    or less where it is."""
    if settings.mode is GovernorMode.THROUGHPUT:
        return 0.0
    waits = []
    for ledger in requests:
        short_ms = needed_ms + ledger.overspend_ms
        if short_ms > settings.share * settings.counted_ms(ledger, base_ms):
            waits.append((short_ms / settings.share - ledger.plain_ms) / base_ms - 1)
    if settings.mode is GovernorMode.BUCKET:
        short_ms = needed_ms + replica.debt_ms - settings.capacity_tokens * base_ms / batch
        waits.append(short_ms / (settings.refill_share * base_ms))
    return max(waits, default=0.0)


def charge(
    settings: GovernorSettings,
    replica: ReplicaLedger,
    requests: Sequence[RequestLedger],
    *,
    base_ms: float,
    spent_ms: float,
    plain_steps: Sequence[int],
) -> None:
    """Book a step that took ``spent_ms`` and did the work of so many plain steps per request."""
    plain_ms = base_ms * sum(plain_steps) / len(plain_steps)
    overspend_ms = spent_ms - plain_ms
    replica.plain_ms += plain_ms
    replica.overspend_ms += overspend_ms
    replica.debt_ms = max(0.0, replica.debt_ms + overspend_ms - settings.refill_share * plain_ms)
    for ledger, steps in zip(requests, plain_steps, strict=True):
        ledger.plain_ms += base_ms * steps
        ledger.overspend_ms += spent_ms - base_ms * steps
