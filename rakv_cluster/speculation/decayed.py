"""Accepted / tried counts of which the older ones fade."""

from __future__ import annotations


class DecayedCounts:
    """``tried`` and ``accepted`` per cell; they fade by ``decay`` with each count in their cell."""

    def __init__(self, cells: int, decay: float) -> None:
        self._decay = decay
        self.tried = [0.0] * cells
        self.accepted = [0.0] * cells

    def record(self, cell: int, accepted: bool) -> None:
        """Count one draft that was looked at."""
        self.tried[cell] = self.tried[cell] * self._decay + 1.0
        self.accepted[cell] = self.accepted[cell] * self._decay + accepted

    def shrunk(self, cell: int, toward: float, weight: float) -> float:
        """A cell's rate, ``toward`` counting as much as ``weight`` observations."""
        return (self.accepted[cell] + weight * toward) / (self.tried[cell] + weight)
