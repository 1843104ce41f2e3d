"""How long answers become at least: what a request's first drafts may be paid from."""

from __future__ import annotations

from bisect import bisect_right

_DECAY = 0.98
_LIKELY_SHARE = 0.75
_DOUBT = 0.5

LENGTH_EDGES = tuple(sorted({round(4 * 1.1**step) for step in range(64)}))
"""4, 5, 6, 7, 8, 9, 10, 11, 13, 14, ... 1,621 output tokens."""


class AnswerLengths:
    """Decayed counts of the answers that reached each length, of those whose limit let them."""

    def __init__(self) -> None:
        self._allowed = [0.0] * len(LENGTH_EDGES)
        self._reached = [0.0] * len(LENGTH_EDGES)

    def record(self, tokens: int, *, limit: int) -> None:
        """An answer of at most ``limit`` tokens had so many."""
        for index in range(_edges_within(limit)):
            self._allowed[index] = self._allowed[index] * _DECAY + 1.0
            reached = tokens >= LENGTH_EDGES[index]
            self._reached[index] = self._reached[index] * _DECAY + reached

    def likely_tokens(self, limit: int) -> int:
        """Tokens that three answers in four with this limit reach; 0 before two were seen."""
        likely = 0
        for index in range(_edges_within(limit)):
            if self._reached[index] < _LIKELY_SHARE * (self._allowed[index] + _DOUBT):
                break
            likely = LENGTH_EDGES[index]
        return likely


def _edges_within(limit: int) -> int:
    return bisect_right(LENGTH_EDGES, limit)
