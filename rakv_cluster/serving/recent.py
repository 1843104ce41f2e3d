"""The last requests of an ingress, for whoever looks at its dashboard."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One ended request: what it was, where its prompt came from, how it went.

    ``plan`` counts prompt tokens by source, ``steps_by_drafts`` decode steps by the number of
    drafts they checked. ``at_s`` is when it ended, on the wall clock.
    """

    id: str
    at_s: float
    endpoint: str
    status: str
    reuse: str
    plan: Mapping[str, int]
    output_tokens: int
    steps_by_drafts: Mapping[int, int]
    accepted_tokens: int
    ttft_ms: float
    total_ms: float
    warm: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 95th percentile of ``count`` values, in milliseconds; 0 of none."""

    count: int
    p50_ms: float
    p95_ms: float


class RecentRequests:
    """The last ``capacity``, newest first."""

    def __init__(self, capacity: int = 256) -> None:
        self._lines: deque[RequestLine] = deque(maxlen=capacity)

    def add(self, line: RequestLine) -> None:
        """Note an ended request."""
        self._lines.appendleft(line)

    def lines(self, count: int) -> list[RequestLine]:
        """The newest ``count``."""
        return list(self._lines)[:count]

    def ttft(self, *, warm: bool) -> Spread:
        """Of the requests here that were answered, by whether their prompt was mostly reused."""
        return spread([x.ttft_ms for x in self._lines if x.status == "ok" and x.warm is warm])


def spread(values_ms: Sequence[float]) -> Spread:
    """Nearest-rank percentiles."""
    if not values_ms:
        return Spread(0, 0.0, 0.0)
    ordered = sorted(values_ms)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return Spread(len(ordered), at(0.5), at(0.95))
