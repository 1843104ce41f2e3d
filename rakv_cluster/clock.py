"""Time as an argument: nothing below the outermost shell reads a clock by itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock for durations and a wall clock for stored timestamps."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.perf_counter()

    def wall_s(self) -> float:
        return time.time()
