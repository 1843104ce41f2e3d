"""Making a model's calibration: cases of documents in other orders, a curve over fractions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.step import Runner
from rakv_cluster.reuse.calibration import CurvePoint
from rakv_cluster.reuse.fidelity import (
    PIECE_ROWS,
    FidelityCase,
    FidelityPrompt,
    Ids,
    Measured,
)
from rakv_cluster.reuse.probing import NOT_PROBED, ProbeSettings
from rakv_cluster.reuse.selection import Selector, default_selector

FRACTIONS = (0.0, 0.05, 0.15, 0.3, 0.55)
_RESAMPLES = 2000
_BOUNDS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic and its bootstrap bounds over cases (95%)."""

    value: float
    low: float
    high: float


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    seed: int = 1,
) -> Interval:
    """``statistic`` maps ``[..., n]`` to ``[...]``; percentile bounds over resampled cases."""
    data = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(data), (_RESAMPLES, len(data)))
    low, high = np.percentile(statistic(data[draws]), _BOUNDS)
    return Interval(float(statistic(data)), float(low), float(high))


def mean_of(values: Sequence[float]) -> Interval:
    """The mean over cases."""
    return bootstrap(values, lambda data: data.mean(-1))


def shuffled_prompt(
    front: Ids,
    documents: Sequence[Ids],
    question: Ids,
    rng: np.random.Generator,
    *,
    answer: Ids = (),
    donor_question: Ids = (),
) -> FidelityPrompt:
    """A case's prompt; the donors' two orders are drawn such that neither starts as the prompt."""
    count = len(documents)
    orders: list[tuple[int, ...]] = []
    while len(orders) < 2:
        order = tuple(int(index) for index in rng.permutation(count))
        if count < 2 or (order[0] != 0 and order not in orders):
            orders.append(order)
        elif count == 2:
            orders.append((1, 0))
    return FidelityPrompt(
        front, tuple(documents), question, orders[0], orders[1], answer, donor_question
    )


@dataclass(frozen=True, slots=True)
class Curves:
    """Of the plain selector, and of the probe's (empty if it does not run)."""

    plain: tuple[CurvePoint, ...]
    probed: tuple[CurvePoint, ...]


def measure_curves(
    runner: Runner,
    rotation: KeyRotation,
    prompts: Sequence[FidelityPrompt],
    ends: frozenset[int],
    *,
    selector: Selector = default_selector,
    probe: ProbeSettings = NOT_PROBED,
    fractions: Sequence[float] = FRACTIONS,
    piece_rows: int = PIECE_ROWS,
) -> Iterator[Curves]:
    """One case per prompt, every fraction on it; after each, the curves of all so far.

    No forward has more than ``piece_rows`` rows.
    """
    plain: dict[float, list[Measured]] = {fraction: [] for fraction in fractions}
    probed: dict[float, list[Measured]] = {f: [] for f in fractions if probe.layers}
    for prompt in prompts:
        case = FidelityCase(runner, rotation, prompt, ends, probe, piece_rows=piece_rows)
        for selects, measured in ((selector, plain), (probe.selector, probed)):
            for fraction, cases in measured.items():
                cases.append(case.measure(selects, fraction))
        yield Curves(curve(plain), curve(probed))


def curve(measured: Mapping[float, Sequence[Measured]]) -> tuple[CurvePoint, ...]:
    """The points of a calibration from all cases' figures at each fraction."""
    points = []
    for fraction, cases in sorted(measured.items()):
        kl = mean_of([case.kl for case in cases])
        p95 = bootstrap([case.kl for case in cases], lambda data: np.percentile(data, 95, axis=-1))
        top1 = mean_of([case.top1 for case in cases])
        agreement = mean_of([case.agreement for case in cases])
        points.append(
            CurvePoint(
                fraction,
                kl.value, kl.low, kl.high,
                p95.value, p95.high,
                top1.value, top1.low, top1.high,
                agreement.value, agreement.low, agreement.high,
            )
        )  # fmt: skip
    return tuple(points)
