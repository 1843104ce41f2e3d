"""How often a model's drafts are right, by how sure it was of them.

A model's probability of its own draft says more of this draft than any count of earlier ones, so
drafting ends where the model becomes unsure (dynamic lookahead: Mamou et al., arXiv:2405.04304).
It is no chance of acceptance, though: a target that takes its likeliest token agrees with most
drafts of probability 0.25 (docs/experiments.md). So outcomes are counted by bands of probability.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from rakv_cluster.speculation.decayed import DecayedCounts

EDGES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Probabilities where a new band begins."""

_DECAY = 0.998
_PRIOR_WEIGHT = 8.0


class Confidence:
    """Decayed accepted / tried counts per band."""

    def __init__(self) -> None:
        self._counts = DecayedCounts(len(EDGES) + 1, _DECAY)

    def record(self, probability: float, accepted: bool) -> None:
        """Count one draft that was looked at."""
        self._counts.record(bisect_right(EDGES, probability), accepted)

    def rates(self) -> tuple[float, ...]:
        """Acceptance per band; until it is seen, the root of the band's middle."""
        middles = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]
        return tuple(
            self._counts.shrunk(band, math.sqrt(middle), _PRIOR_WEIGHT)
            for band, middle in enumerate(middles)
        )


def rate_of(rates: Sequence[float], probability: float) -> float:
    """Acceptance of a draft of this probability by :meth:`Confidence.rates`."""
    return rates[bisect_right(EDGES, probability)]
