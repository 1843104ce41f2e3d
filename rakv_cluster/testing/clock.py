"""Time that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """A :class:`rakv_cluster.clock.Clock`: :meth:`advance` moves both clocks, :meth:`jump` one."""

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1.7e9) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Let time pass; raises ``ValueError`` for a negative duration."""
        if seconds < 0:
            raise ValueError(f"time does not pass backwards: {seconds} s")
        self._monotonic_s += seconds
        self._wall_s += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forwards or back, as an administrator or NTP would."""
        self._wall_s += seconds
