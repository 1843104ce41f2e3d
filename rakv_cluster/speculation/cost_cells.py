"""Robust means of what steps cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

CELL_GAIN = 0.1
CLIP = math.log(1.5)
"""Largest change of a log cost that one measurement can argue for: a stall is not a new cost."""


@dataclass(slots=True)
class Cell:
    """A robust mean in the log domain; ``outlier`` is the last surprise if it was clipped."""

    value: float
    samples: int
    seen_at: int = 0
    outlier: float = 0.0

    def move(self, surprise: float) -> None:
        """Learn from a sample ``exp(surprise)`` times the value.

        One that is far off counts as CLIP; a second one in the same direction is believed.
        """
        self.samples += 1
        believed = clipped(surprise)
        if believed != surprise and surprise * self.outlier > 0:
            self.value *= math.exp(min(surprise, self.outlier, key=abs))
            self.outlier = 0.0
            return
        self.outlier = surprise if believed != surprise else 0.0
        # The first samples are averaged, so that a cell is not its first measurement for long.
        self.value *= math.exp(believed * max(CELL_GAIN, 1.0 / self.samples))

    def excuse(self, surprise: float) -> None:
        """The plain step behind a sample that was far off was a ``surprise`` itself: if it went
        the same way and half as far, the machine was the cause of both."""
        if surprise * self.outlier > 0 and abs(surprise) > abs(self.outlier) / 2:
            self.outlier = 0.0


@dataclass(slots=True)
class Base(Cell):
    """A column's base: ``value`` at ``context`` tokens, the mean of its samples' contexts."""

    context: float = 0.0

    def drift(self, context: float, value: float) -> None:
        """Stand for ``context`` from now on, where ``value`` is expected."""
        self.context, self.value = context, value


def clipped(surprise: float) -> float:
    """A log change, no larger than CLIP."""
    return min(max(surprise, -CLIP), CLIP)


def on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` of the straight lines from each of ``points`` (ascending) to the next.

    Outside, the line through the first and the last goes on, if it rises: two neighbours may be so
    close that noise alone would fix their slope. Never less than half the first one's value.
    """
    at = bisect_left([place for place, _ in points], x)
    if 0 < at < len(points):
        (left, low), (right, high) = points[at - 1], points[at]
        return low + (high - low) * (x - left) / (right - left)
    (first, low), (last, high) = points[0], points[-1]
    slope = max(high - low, 0.0) / (last - first) if len(points) > 1 else 0.0
    if at == 0:
        return max(low - slope * (first - x), low / 2)
    return high + slope * (x - last)
