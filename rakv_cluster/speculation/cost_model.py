"""What a step costs on this replica: measured, never modelled.

Cost over rows is not convex (kernels switch at row counts), so there is no formula to fit: a cell
per (rows, context, batch) bucket holds what was measured. Steps of one (context, batch) form a
*column*; its *base* is the step of one row per sequence (K=0), and its wider steps are kept as
ratios to the base: kernels fix the ratio, while the base follows the machine's load. All bases
share a *level*, so that a column that is not in use is not left behind with yesterday's times.

A base grows steadily with the context, and a bucket of contexts is wide: so a column's base is a
point, what its steps took in the mean at the context they had in the mean, and between two points
a straight line is read.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rakv_cluster.errors import ConfigError

LEVEL_GAIN = 0.1
CELL_GAIN = 0.1
CLIP = math.log(1.5)
"""Largest change of a log cost that one measurement can argue for: a stall is not a new cost."""

DOUBT_HALF_LIFE_STEPS = 500
"""Steps after which half of an unused wide step's extra cost is still believed."""

Column = tuple[int, int]
"""(context bucket, batch bucket)"""


@dataclass(frozen=True, slots=True)
class CostBuckets:
    """Upper edges, ascending. A step belongs to the smallest edge it does not exceed.

    ``rows`` follow the runner's kernels: where rows are padded up to a packed size, only that
    size is an edge. Contexts are tokens per sequence, averaged over the step's sequences.
    """

    rows: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    context: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    batch: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

    def __post_init__(self) -> None:
        for name, edges in asdict(self).items():
            if not edges or edges[0] < 1 or any(a >= b for a, b in pairwise(edges)):
                raise ConfigError(f"cost buckets of {name} must ascend from 1 or more", field=name)

    def covers(self, rows: int) -> bool:
        """Whether a step of so many rows has a bucket."""
        return rows <= self.rows[-1]

    def rows_edge(self, rows: int) -> int:
        """The rows bucket of a step."""
        return _edge(self.rows, rows)

    def column(self, *, context_tokens: int, batch: int) -> Column:
        """The other two buckets; contexts and batches beyond the last edge belong to it."""
        return (_edge(self.context, context_tokens), _edge(self.batch, batch))


def _edge(edges: tuple[int, ...], value: int) -> int:
    return edges[min(bisect_left(edges, value), len(edges) - 1)]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of a decode step by its number of rows, for one batch at one context.

    ``rows`` ascend; a step costs what the next edge costs. Empty where nothing was measured.
    ``hoped_ms`` is less where the measurement is old: reason to try again, not to rely on.
    """

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()
    hoped_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.hoped_ms:
            object.__setattr__(self, "hoped_ms", self.ms)

    def at(self, rows: int) -> float:
        """Cost of a step of ``rows``; infinite beyond what was measured."""
        index = bisect_left(self.rows, rows)
        return self.ms[index] if index < len(self.ms) else math.inf


ARMS = (0, 1, 2, 3, 4, 7, 8, 15)
"""Fixed numbers of drafts that hindsight compares with: the paper's, and full packed rows."""


@dataclass(frozen=True, slots=True)
class ArmCosts:
    """What a decision cost, and what every one of :data:`ARMS` would have cost in its place."""

    chosen: int
    chosen_ms: float
    arm_ms: tuple[float, ...]

    @property
    def known(self) -> bool:
        """Whether the chosen step's cost was ever measured."""
        return math.isfinite(self.chosen_ms)

    @classmethod
    def of(cls, costs: StepCosts, *, base_rows: int, chosen: int) -> ArmCosts:
        """For one sequence of a step, the others left at one row each."""
        arm_ms = tuple(costs.at(base_rows + drafts) for drafts in ARMS)
        return cls(chosen, costs.at(base_rows + chosen), arm_ms)


@dataclass(frozen=True, slots=True)
class CostSample:
    """One measured step; ``batch`` sequences of ``context_tokens`` each."""

    rows: int
    context_tokens: int
    batch: int
    ms: float


@dataclass(slots=True)
class _Cell:
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
        clipped = _clip(surprise)
        if clipped != surprise and surprise * self.outlier > 0:
            self.value *= math.exp(min(surprise, self.outlier, key=abs))
            self.outlier = 0.0
            return
        self.outlier = surprise if clipped != surprise else 0.0
        # The first samples are averaged, so that a cell is not its first measurement for long.
        self.value *= math.exp(clipped * max(CELL_GAIN, 1.0 / self.samples))


@dataclass(slots=True)
class _Base(_Cell):
    """A column's base: ``value`` at ``context`` tokens, the mean of its samples' contexts."""

    context: float = 0.0

    def drift(self, context: float, value: float) -> None:
        """Stand for ``context`` from now on, where ``value`` is expected."""
        self.context, self.value = context, value


class CostTable:
    """Measured columns, kept current by :meth:`observe`, which belongs to one thread; any thread
    may read costs.

    A wide step says nothing about its base: were it to move base or level, a ratio that is wrongly
    small would slow the base down with it and never be found out.
    """

    def __init__(self, buckets: CostBuckets) -> None:
        self.buckets = buckets
        self._level = 1.0
        self._observed = 0
        self._bases: dict[Column, _Base] = {}
        self._ratios: dict[Column, dict[int, _Cell]] = {}
        self._seen_rows: set[int] = set()
        """Row buckets of all ratios and bases: others need no search for a donor."""
        self._known: dict[tuple[int, int], StepCosts] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no plain step was ever measured."""
        return not self._bases

    def observe(self, sample: CostSample) -> None:
        """Learn from a decode step; steps beyond the last rows bucket are not kept."""
        if not self.buckets.covers(sample.rows) or sample.ms <= 0:
            return
        self._known.clear()
        self._observed += 1
        self._seen_rows.add(self.buckets.rows_edge(sample.rows))
        column = self.buckets.column(context_tokens=sample.context_tokens, batch=sample.batch)
        rows = self.buckets.rows_edge(sample.rows)
        if rows <= self._base_rows(column):
            self._observe_base(column, sample)
        else:
            self._observe_ratio(column, rows, sample)

    def _observe_base(self, column: Column, sample: CostSample) -> None:
        context = sample.context_tokens
        expected_ms = self._base(column, context) * self._level
        if math.isinf(expected_ms):
            self._bases[column] = _Base(sample.ms / self._level, 1, context=context)
            return
        surprise = _clip(math.log(sample.ms / expected_ms))
        base = self._bases.get(column)
        if base is None:
            base = _Base(self._base(column, context), 0, context=context)
        else:
            self._level *= math.exp(surprise * LEVEL_GAIN)
            gain = max(CELL_GAIN, 1 / (base.samples + 1))
            nearer = base.context + gain * (context - base.context)
            base.drift(nearer, self._base(column, nearer))
        base.move(surprise)
        self._bases[column] = base

    def _observe_ratio(self, column: Column, rows: int, sample: CostSample) -> None:
        base_ms = self._base(column, sample.context_tokens) * self._level
        if math.isinf(base_ms):
            return
        ratios = self._ratios.setdefault(column, {})
        expected = self._ratio(column, rows)
        if math.isinf(expected):
            ratios[rows] = _Cell(sample.ms / base_ms, 1, self._observed)
            return
        cell = ratios.setdefault(rows, _Cell(expected, 0))
        cell.seen_at = self._observed
        cell.move(math.log(sample.ms / (expected * base_ms)))

    def step_costs(self, *, batch: int, context_tokens: int) -> StepCosts:
        """Costs of every rows bucket for ``batch`` sequences at this mean context."""
        if not self.buckets.covers(batch) or not self._bases:
            return StepCosts()
        known = self._known.get((batch, context_tokens))
        if known is None:
            column = self.buckets.column(context_tokens=context_tokens, batch=batch)
            first = bisect_left(self.buckets.rows, batch)
            base_ms = self._base(column, context_tokens) * self._level
            ratios = {rows: self._ratio(column, rows) for rows in self.buckets.rows[first:]}
            finite = {rows: ratio for rows, ratio in ratios.items() if math.isfinite(ratio)}
            known = StepCosts(
                tuple(finite),
                tuple(base_ms * ratio for ratio in finite.values()),
                tuple(base_ms * self._hoped(column, rows, finite[rows]) for rows in finite),
            )
            self._known[batch, context_tokens] = known
        return known

    def _base_rows(self, column: Column) -> int:
        return self.buckets.rows_edge(column[1])

    def _base(self, column: Column, context: float) -> float:
        """What a column's base is expected to be at this context; infinite if none was measured.

        For a batch of which nothing was measured, as many rows of the nearest other batch stand
        in, if they were.
        """
        points = [
            (base.context, base.value)
            for (_, batch), base in tuple(self._bases.items())
            if batch == column[1]
        ]
        if points:
            return _on_line(sorted(points), context)
        if not self._bases:
            return math.inf
        donor = min(tuple(self._bases), key=lambda other: _distance(column, other))
        as_wide = self._measured_ratio(donor, self._base_rows(column))
        return self._base(donor, context) * (as_wide if math.isfinite(as_wide) else 1.0)

    def _ratio(self, column: Column, rows: int) -> float:
        """Cost of ``rows`` over the column's base: measured, else as in the nearest column that
        has measured both; infinite if none has."""
        own = self._measured_ratio(column, rows)
        if math.isfinite(own) or rows not in self._seen_rows:
            return own
        base_rows = self._base_rows(column)
        donors = [
            (other, wide / narrow)
            for other in tuple(self._ratios)
            if math.isfinite(wide := self._measured_ratio(other, rows))
            and math.isfinite(narrow := self._measured_ratio(other, base_rows))
        ]
        if not donors:
            return math.inf
        return min(donors, key=lambda donor: _distance(column, donor[0]))[1]

    def _hoped(self, column: Column, rows: int, ratio: float) -> float:
        """What a ratio may have become since it was seen: its excess is doubted with age.

        A wide step that was once measured under load would otherwise never be tried again.
        """
        cell = self._ratios.get(column, {}).get(rows)
        age = self._observed - (cell.seen_at if cell is not None else 0)
        doubt: float = 0.5 ** (age / DOUBT_HALF_LIFE_STEPS)
        return 1.0 + (ratio - 1.0) * doubt if ratio > 1.0 else ratio

    def _measured_ratio(self, column: Column, rows: int) -> float:
        if rows == self._base_rows(column):
            return 1.0
        cell = self._ratios.get(column, {}).get(rows)
        return cell.value if cell is not None else math.inf

    def to_json(self) -> dict[str, object]:
        """The table as plain data."""
        return {
            "buckets": {name: list(edges) for name, edges in asdict(self.buckets).items()},
            "level": self._level,
            "bases": [
                [*column, base.value, base.samples, base.context]
                for column, base in self._bases.items()
            ],
            "ratios": [
                [*column, rows, cell.value, cell.samples]
                for column, cells in self._ratios.items()
                for rows, cell in cells.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], buckets: CostBuckets) -> CostTable:
        """What :meth:`to_json` gave.

        Raises ``ValueError``, ``TypeError`` or ``KeyError`` if it is for other buckets or unsound.
        """
        table = cls(buckets)
        if data["buckets"] != table.to_json()["buckets"]:
            raise ValueError("costs were measured for other buckets")
        table._level = _positive(data["level"])
        for context, batch, value, samples, mean_context in data["bases"]:
            column = buckets.column(context_tokens=mean_context, batch=int(batch))
            if column != (context, batch):
                raise ValueError(f"{mean_context} tokens are no mean of bucket {context}")
            table._bases[column] = _Base(
                _positive(value), int(samples), context=float(mean_context)
            )
            table._seen_rows.add(buckets.rows_edge(int(batch)))
        for context, batch, rows, value, samples in data["ratios"]:
            ratios = table._ratios.setdefault((int(context), int(batch)), {})
            ratios[int(rows)] = _Cell(_positive(value), int(samples))
            table._seen_rows.add(int(rows))
        return table


def _clip(surprise: float) -> float:
    return min(max(surprise, -CLIP), CLIP)


def _positive(value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value} is no cost")
    return float(value)


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
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


def _distance(column: Column, other: Column) -> tuple[float, float]:
    """Batches differ more than contexts do: they change which kernels run."""
    context, batch = (abs(math.log(a / b)) for a, b in zip(column, other, strict=True))
    return (batch, context)
