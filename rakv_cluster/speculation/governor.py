"""What speculation may lose against K=0, and the ledgers that prove it.

*Overspend* is time above what plain decoding would have taken for the same tokens, negative where
drafts paid. Two ledgers, both in ms:

- the replica's: no window of 1,000 tokens may lose more than :data:`WINDOW_SHARE` of its plain time
  (0.9%; what no prediction foresaw has the rest of 1%). That is what its tokens took so far, and
  for those to come what the quickest of the last 1,000 took: what is lost while the machine is
  slow must not be more than can be afforded once it is quick again.
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
WINDOW_SHARE = 0.009
_STARTS_TOKENS = 32
"""Windows that begin within so many tokens are one, on the safe side, so that there are few."""


class GovernorMode(str, Enum):
    """``bucket``: replica and request bounds; ``strict``: a tighter one for every request;
    ``throughput``: none."""

    BUCKET = "bucket"
    STRICT = "strict"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class GovernorSettings:
    """Shares of plain time.

    Of what a request may lose, decisions that lead to no drafts take no more than
    ``deciding_share`` once they are held back (:func:`idle_steps`): the rest is for drafts.
    ``strict_reserve`` is the share by which a strict request's step may take longer than predicted
    without breaking its bound.
    """

    mode: GovernorMode = GovernorMode.BUCKET
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
class _Starts:
    """Windows that began within the same few tokens, ``first`` being the first of them: what had
    been lost beyond the share, where that was least, and the quickest token's plain time."""

    first: int
    least_ms: float
    quickest_ms: float = math.inf

    @property
    def over_at(self) -> int:
        """Token at which the last of them is over."""
        return (self.first // _STARTS_TOKENS + 1) * _STARTS_TOKENS - 1 + WINDOW_TOKENS


@dataclass(slots=True)
class ReplicaLedger:
    """Totals since start, and the ``starts`` of the windows that are not over yet."""

    plain_ms: float = 0.0
    overspend_ms: float = 0.0
    tokens: int = 0
    starts: deque[_Starts] = field(default_factory=deque)

    @property
    def _beyond_ms(self) -> float:
        """What was lost beyond the share since the beginning."""
        return self.overspend_ms - WINDOW_SHARE * self.plain_ms

    def book(self, *, plain_ms: float, overspend_ms: float, tokens: int) -> None:
        """So many tokens took so much plain time, and so much more was lost (negative: gained)."""
        starts, now = self.starts, _Starts(self.tokens, self._beyond_ms)
        if starts and starts[-1].over_at == now.over_at:
            starts[-1].least_ms = min(starts[-1].least_ms, now.least_ms)
        else:
            starts.append(now)
        self.plain_ms += plain_ms
        self.overspend_ms += overspend_ms
        self.tokens += tokens
        if tokens:
            starts[-1].quickest_ms = min(starts[-1].quickest_ms, plain_ms / tokens)
        while starts[0].over_at <= self.tokens:
            starts.popleft()

    def left_ms(self, token_ms: float) -> float:
        """What may be lost before some window that is not over yet has lost its share, if a plain
        token takes ``token_ms`` now."""
        token_ms = self._to_come_ms(token_ms)
        begun = (self._left_since(start, token_ms) for start in self.starts)
        return min((WINDOW_SHARE * WINDOW_TOKENS * token_ms, *begun))

    def tokens_until(self, needed_ms: float, token_ms: float) -> int:
        """Plain tokens after which so much may be lost: when the windows are over in which it may
        not."""
        token_ms = self._to_come_ms(token_ms)
        short = [start for start in self.starts if self._left_since(start, token_ms) < needed_ms]
        return short[-1].over_at - self.tokens if short else 0

    def _to_come_ms(self, token_ms: float) -> float:
        return min((token_ms, *(start.quickest_ms for start in self.starts)))

    def _left_since(self, start: _Starts, token_ms: float) -> float:
        to_come = max(start.first + WINDOW_TOKENS - self.tokens, 0)
        return WINDOW_SHARE * to_come * token_ms - (self._beyond_ms - start.least_ms)


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
        bounds.append(replica.left_ms(base_ms / batch))
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
        tokens = replica.tokens_until(needed_ms, base_ms / batch)
        waits.append(tokens / batch)
    return max(waits, default=0.0)


def idle_steps(settings: GovernorSettings, *, base_ms: float, deciding_ms: float) -> float:
    """Plain steps behind a decision that led to no drafts, so that deciding does not use up what
    drafts need."""
    return deciding_ms / (settings.deciding_share * settings.share * base_ms)


def half_used(
    settings: GovernorSettings, replica: ReplicaLedger, *, base_ms: float, batch: int
) -> bool:
    """Whether more than half of what the replica may lose is lost."""
    token_ms = base_ms / batch
    half_ms = WINDOW_SHARE * WINDOW_TOKENS * token_ms / 2
    return settings.mode is GovernorMode.BUCKET and replica.left_ms(token_ms) < half_ms


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
    replica.book(plain_ms=plain_ms, overspend_ms=spent_ms - plain_ms, tokens=sum(plain_steps))
    for ledger, steps in zip(requests, plain_steps, strict=True):
        ledger.plain_ms += base_ms * steps
        ledger.overspend_ms += spent_ms - base_ms * steps
