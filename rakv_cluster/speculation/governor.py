"""What speculation may lose against K=0, and the ledgers that prove it.

*Overspend* is time above what plain decoding would have taken for the same tokens, negative where
drafts paid. Two ledgers, both in ms:

- the replica's: no window of 1,000 tokens may lose more than ``capacity_tokens`` plain tokens'
  time (9; with one more for what no prediction foresaw, 1%). It keeps the overspend at each token
  of the last 1,000 that was lower than at every token since; a step may not be able to lift the
  overspend by more than the capacity above the lowest of them.
- each request's, against its own plain time with prefill included: what a client sees. The plain
  time of the tokens that its answer is likely to reach counts from the start (``likely_ms``; not in
  ``strict``): drafts that pay later have to be bought first.

Charged are measured times. The bounds hold as far as a step's cost is predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

WINDOW_TOKENS = 1_000


class GovernorMode(str, Enum):
    """``bucket``: replica and request bounds; ``strict``: a tighter one for every request;
    ``throughput``: none."""

    BUCKET = "bucket"
    STRICT = "strict"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class GovernorSettings:
    """Shares are of plain time; ``capacity_tokens`` is in plain tokens' time.

    Of what a request may lose, decisions that lead to no drafts take no more than
    ``deciding_share`` once they are held back (:func:`idle_steps`): the rest is for drafts.
    ``strict_reserve`` is the share by which a strict request's step may take longer than predicted
    without breaking its bound.
    """

    mode: GovernorMode = GovernorMode.BUCKET
    capacity_tokens: float = 9.0
    deciding_share: float = 0.1
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
        return passed_ms if self.mode is GovernorMode.STRICT else max(passed_ms, ledger.likely_ms)

    @property
    def reserve(self) -> float:
        """Share of a step's predicted time that is held back for surprises."""
        return self.strict_reserve if self.mode is GovernorMode.STRICT else 0.0


@dataclass(slots=True)
class RequestLedger:
    """One request's overspend and the plain time it is measured against, prefill included.

    ``likely_ms`` of plain time will probably have passed before it ends.
    """

    plain_ms: float = 0.0
    overspend_ms: float = 0.0
    likely_ms: float = 0.0


@dataclass(slots=True)
class ReplicaLedger:
    """Totals since start. ``lows`` are pairs of tokens and overspend, both ascending: where the
    overspend of the last window was lower than ever since."""

    plain_ms: float = 0.0
    overspend_ms: float = 0.0
    tokens: int = 0
    lows: deque[tuple[int, float]] = field(default_factory=deque)

    @property
    def debt_ms(self) -> float:
        """Most that any window which is not over yet has lost."""
        return max(self.overspend_ms - self.lows[0][1], 0.0) if self.lows else 0.0

    def book(self, overspend_ms: float, tokens: int) -> None:
        """So much more was lost (negative: gained) over so many tokens."""
        lows = self.lows
        while lows and lows[-1][1] >= self.overspend_ms:
            lows.pop()
        lows.append((self.tokens, self.overspend_ms))
        self.overspend_ms += overspend_ms
        self.tokens += tokens
        while lows and lows[0][0] <= self.tokens - WINDOW_TOKENS:
            lows.popleft()

    def tokens_until(self, debt_ms: float) -> int:
        """Plain tokens after which no window has lost more than ``debt_ms``."""
        over = [tokens for tokens, ms in self.lows if self.overspend_ms - ms > debt_ms]
        return over[-1] + WINDOW_TOKENS - self.tokens if over else 0


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
        capacity_ms = settings.capacity_tokens * base_ms / batch
        waits.append(replica.tokens_until(capacity_ms - needed_ms) / batch)
    return max(waits, default=0.0)


def idle_steps(settings: GovernorSettings, *, base_ms: float, deciding_ms: float) -> float:
    """Plain steps behind a decision that led to no drafts, so that deciding does not use up what
    drafts need."""
    return deciding_ms / (settings.deciding_share * settings.share * base_ms)


def half_used(
    settings: GovernorSettings, replica: ReplicaLedger, *, base_ms: float, batch: int
) -> bool:
    """Whether more than half of what the replica may lose is lost."""
    half_ms = settings.capacity_tokens * base_ms / batch / 2
    return settings.mode is GovernorMode.BUCKET and replica.debt_ms > half_ms


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
    replica.book(overspend_ms, sum(plain_steps))
    for ledger, steps in zip(requests, plain_steps, strict=True):
        ledger.plain_ms += base_ms * steps
        ledger.overspend_ms += spent_ms - base_ms * steps
