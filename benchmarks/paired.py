"""Paired comparisons: bootstrap intervals over requests that every arm served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
"""Samples ``[resamples, n]`` to one figure per resample."""

_RESAMPLES = 4_000


def median(samples: np.ndarray) -> np.ndarray:
    """Median of each row."""
    return np.median(samples, axis=-1)


def geometric_mean(samples: np.ndarray) -> np.ndarray:
    """Geometric mean of each row of ratios: that of the inverse ratios is its inverse."""
    return np.exp(np.log(samples).mean(axis=-1))


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its 95% percentile-bootstrap interval."""

    value: float
    low: float
    high: float


def bootstrap(values: Sequence[float], statistic: Statistic, *, seed: int) -> Interval:
    """``statistic`` of the values, and its interval under resampling them.

    Raises ``ValueError`` without values.
    """
    if not values:
        raise ValueError("no values to resample")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), (_RESAMPLES, len(data)))
    low, high = np.quantile(statistic(data[picks]), (0.025, 0.975))
    return Interval(float(statistic(data[None])[0]), float(low), float(high))
