"""How far a replica that has no work is believed to be slow. Pure."""

from __future__ import annotations

import math

import numpy as np

from rakv_cluster.routing.score import Floats

ORDINARY = 2.0
"""So many times the typical cost is believed for good: fleets are of more than one hardware."""


def typical(costs: Floats) -> Floats:
    """The lower median over the last axis, [..., R] to [...]; NaN where none is known.

    The lower one: of two replicas, the quicker.
    """
    known = (~np.isnan(costs)).sum(axis=-1, keepdims=True)
    ordered = np.sort(costs, axis=-1)  # NaN come last
    middle = np.maximum(known - 1, 0) // 2
    return np.take_along_axis(ordered, middle, axis=-1)[..., 0]


def doubted(claimed: Floats, usual: Floats, idle_s: float, doubt_s: float) -> Floats:
    """Costs to believe of a replica that has been without work for ``idle_s``.

    Costs are measured on work. A stall while the last of it ran may have made a replica look many
    times slower; then it gets none, and nothing corrects it. So what it claims above
    :data:`ORDINARY` times the ``usual`` fades by e in ``doubt_s``, until it is worth a request,
    which shows what is true. What is unknown (NaN) on either side stays as claimed.
    """
    ordinary = ORDINARY * usual
    fading = ordinary + (claimed - ordinary) * math.exp(-idle_s / doubt_s)
    return np.where(claimed > ordinary, fading, claimed)
