"""Which reused positions are computed again: pure functions behind one signature.

What a token's KV loses when it is moved behind other text differs from token to token. A selector
spends a given number of recomputed tokens where it expects the most loss. Measured against each
other in ``benchmarks/fidelity.py``; the figures are in docs/experiments.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rakv_cluster.kv.buffer import Positions

Floats = npt.NDArray[np.float32]

_IMPORTANT_SHARE, _FIRST_SHARE = 0.5, 0.2
"""Of the default's count, if importance is known of all."""

_SPREAD_SHARE = 0.15
"""Of what a probe chooses by attention."""


def unknown(count: int) -> Floats:
    """So many figures that nobody knows."""
    return np.full(count, np.nan, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Reused:
    """Positions whose KV is to be reused, ascending, with what is known of each; arrays ``[n]``.

    ``offsets`` count tokens from the start of the position's run: KV that was computed in one piece
    and moved by one distance. ``sensitivity`` says how much the token's values change with what
    stands in front (see :mod:`rakv_cluster.reuse.sensitivity`), ``importance`` how much another
    question attended to it when it was computed, ``attention`` how much this prompt's does, and
    ``deviation`` how much its values in the second layer differ from recomputed ones (CacheBlend's
    measure); NaN where not known.
    """

    positions: Positions
    offsets: Positions
    sensitivity: Floats
    importance: Floats
    deviation: Floats
    attention: Floats

    @property
    def runs(self) -> Positions:
        """The number of each position's run, from 0 to the last one reused: ``[last + 1]``;
        negative where nothing is reused."""
        runs = np.full(int(self.positions[-1]) + 1, -1, dtype=np.int64)
        goes_on = (np.diff(self.positions) == 1) & (np.diff(self.offsets) == 1)
        runs[self.positions] = np.concatenate([[0], np.cumsum(~goes_on)])
        return runs

    def part(self, mask: npt.NDArray[np.bool_]) -> Reused:
        """Those positions that ``mask`` ``[n]`` is true for."""
        return Reused(
            self.positions[mask],
            self.offsets[mask],
            self.sensitivity[mask],
            self.importance[mask],
            self.deviation[mask],
            self.attention[mask],
        )


Selector = Callable[[Reused, int], Positions]
"""``(reused, count)`` to ``min(count, n)`` of the positions, ascending."""


def nothing(reused: Reused, count: int) -> Positions:
    """No repair, whatever ``count`` is: the control at the lower end."""
    return reused.positions[:0]


def everything(reused: Reused, count: int) -> Positions:
    """Full recompute, whatever ``count`` is: the control at the upper end."""
    return reused.positions


def first_of_runs(reused: Reused, count: int) -> Positions:
    """The first tokens of every run (EPIC's LegoLink), equally many of each."""
    return _lowest(reused, reused.offsets.astype(np.float32), count)


def most_sensitive(reused: Reused, count: int) -> Positions:
    """By sensitivity; positions where it is not known come last."""
    return _lowest(reused, -reused.sensitivity, count)


def most_deviating(reused: Reused, count: int) -> Positions:
    """By deviation in the second layer (CacheBlend); not known comes last."""
    return _lowest(reused, -reused.deviation, count)


def most_attended(reused: Reused, count: int) -> Positions:
    """By the question's attention times the root of sensitivity."""
    return _lowest(reused, -reused.attention * _root_of_sensitivity(reused), count)


def most_important(reused: Reused, count: int) -> Positions:
    """By importance times the root of sensitivity; positions where it is not known come last."""
    return _lowest(reused, -reused.importance * _root_of_sensitivity(reused), count)


def at_random(seed: int) -> Selector:
    """Any positions: the control for all the others."""

    def select(reused: Reused, count: int) -> Positions:
        order = np.random.default_rng(seed).random(len(reused.positions), dtype=np.float32)
        return _lowest(reused, order, count)

    return select


def evenly_spread(reused: Reused, count: int) -> Positions:
    """Equally far from each other: positions between them follow them (see
    :mod:`rakv_cluster.model.drift`)."""
    total = len(reused.positions)
    count = min(max(count, 0), total)
    return reused.positions[(2 * np.arange(count) + 1) * total // max(2 * count, 1)]


def default_selector(reused: Reused, count: int) -> Positions:
    """Without a probe: half of ``count`` for the most important tokens, as far as that is known of
    them; two fifths of the rest for the first tokens of runs, and what is left evenly spread."""
    seen = ~np.isnan(reused.importance)
    share = _IMPORTANT_SHARE * float(seen.mean()) if len(seen) else 0.0
    best = most_important(reused.part(seen), round(share * count))
    first_share = _FIRST_SHARE / (1 - _IMPORTANT_SHARE)
    first = first_of_runs(_without(reused, best), round(first_share * (count - len(best))))
    chosen = np.concatenate([best, first])
    rest = evenly_spread(_without(reused, chosen), count - len(chosen))
    return np.sort(np.concatenate([chosen, rest]))


def probed_selector(reused: Reused, count: int) -> Positions:
    """With a probe: what the question attends to, and some evenly spread."""
    spread = evenly_spread(reused, round(_SPREAD_SHARE * count))
    best = most_attended(_without(reused, spread), count - len(spread))
    return np.sort(np.concatenate([spread, best]))


SELECTORS: Mapping[str, Selector] = {
    "none": nothing,
    "first": first_of_runs,
    "deviation": most_deviating,
    "sensitivity": most_sensitive,
    "importance": most_important,
    "attention": most_attended,
    "spread": evenly_spread,
    "all": everything,
}


def _without(reused: Reused, positions: Positions) -> Reused:
    return reused.part(~np.isin(reused.positions, positions))


def _root_of_sensitivity(reused: Reused) -> Floats:
    """1 where it is not known: it is relative to its mean."""
    root: Floats = np.sqrt(np.nan_to_num(reused.sensitivity, nan=1.0))
    return root


def _lowest(reused: Reused, order: Floats, count: int) -> Positions:
    """The ``count`` positions lowest by ``order`` (NaN: highest), the earlier one among equals."""
    chosen = np.argsort(order, kind="stable")[: max(count, 0)]
    return np.sort(reused.positions[chosen])
