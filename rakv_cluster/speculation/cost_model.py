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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rakv_cluster.errors import ConfigError
from rakv_cluster.speculation.cost_cells import CELL_GAIN, Base, Cell, clipped, on_line

LEVEL_GAIN = 0.1

DOUBT_HALF_LIFE_STEPS = 500
"""Steps after which half of an unused wide step's extra cost is still believed."""

_FRESH_STEPS = 32
"""Steps for which a doubt, or a ratio that another column lent, need not be worked out again."""

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

    def having(self, rows: int, ms: float) -> StepCosts:
        """These costs, but for the edge at ``rows``, which was just measured."""
        index = self.rows.index(rows)
        return StepCosts(
            self.rows,
            (*self.ms[:index], ms, *self.ms[index + 1 :]),
            (*self.hoped_ms[:index], ms, *self.hoped_ms[index + 1 :]),
        )

    def times(self, factor: float) -> StepCosts:
        """Every cost ``factor`` times as high."""
        return StepCosts(
            self.rows,
            tuple([factor * ms for ms in self.ms]),
            tuple([factor * ms for ms in self.hoped_ms]),
        )


@dataclass(frozen=True, slots=True)
class CostSample:
    """One measured step; ``batch`` sequences of ``context_tokens`` each."""

    rows: int
    context_tokens: int
    batch: int
    ms: float


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
        self._bases: dict[Column, Base] = {}
        self._ratios: dict[Column, dict[int, Cell]] = {}
        self._seen_rows: set[int] = set()
        """Row buckets of all ratios and bases: others need no search for a donor."""
        self._known: dict[tuple[int, int], StepCosts] = {}
        self._shapes: dict[tuple[Column, int], StepCosts] = {}
        self._suspect: Cell | None = None
        self._surprised = False

    @property
    def surprised(self) -> bool:
        """Whether the last step was so far off that only a plain one can tell what changed: the
        machine, or the cost of such steps."""
        return self._surprised

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
        if self._observed % _FRESH_STEPS == 0:
            self._shapes.clear()
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
        self._surprised = False
        if math.isinf(expected_ms):
            self._shapes.clear()
            self._bases[column] = Base(sample.ms / self._level, 1, context=context)
            return
        surprise = math.log(sample.ms / expected_ms)
        if self._suspect is not None:
            self._suspect.excuse(surprise)
            self._suspect = None
        base = self._bases.get(column)
        if base is None:
            self._shapes.clear()
            base = Base(self._base(column, context), 0, context=context)
        else:
            self._level *= math.exp(clipped(surprise) * LEVEL_GAIN)
            gain = max(CELL_GAIN, 1 / (base.samples + 1))
            nearer = base.context + gain * (context - base.context)
            base.drift(nearer, self._base(column, nearer))
        base.move(surprise)
        self._surprised = base.outlier != 0
        self._bases[column] = base

    def _observe_ratio(self, column: Column, rows: int, sample: CostSample) -> None:
        base_ms = self._base(column, sample.context_tokens) * self._level
        if math.isinf(base_ms):
            return
        ratios = self._ratios.setdefault(column, {})
        expected = self._ratio(column, rows)
        if math.isinf(expected):
            self._shapes.clear()
            ratios[rows] = Cell(sample.ms / base_ms, 1, self._observed)
            return
        cell = ratios.setdefault(rows, Cell(expected, 0))
        cell.seen_at = self._observed
        cell.move(math.log(sample.ms / (expected * base_ms)))
        for key, shape in tuple(self._shapes.items()):
            if key[0] == column:
                self._shapes[key] = shape.having(rows, cell.value)
        self._surprised = cell.outlier != 0
        self._suspect = cell if self._surprised else None

    def step_costs(self, *, batch: int, context_tokens: int) -> StepCosts:
        """Costs of every rows bucket for ``batch`` sequences at this mean context."""
        if not self.buckets.covers(batch) or not self._bases:
            return StepCosts()
        known = self._known.get((batch, context_tokens))
        if known is None:
            column = self.buckets.column(context_tokens=context_tokens, batch=batch)
            shape = self._shape(column, bisect_left(self.buckets.rows, batch))
            known = shape.times(self._base(column, context_tokens) * self._level)
            self._known[batch, context_tokens] = known
        return known

    def _shape(self, column: Column, first: int) -> StepCosts:
        """A column's ratios, as if its base were 1 ms, from the ``first`` rows bucket on."""
        shape = self._shapes.get((column, first))
        if shape is None:
            ratios = {rows: self._ratio(column, rows) for rows in self.buckets.rows[first:]}
            finite = {rows: ratio for rows, ratio in ratios.items() if math.isfinite(ratio)}
            shape = StepCosts(
                tuple(finite),
                tuple(finite.values()),
                tuple(self._hoped(column, rows, ratio) for rows, ratio in finite.items()),
            )
            self._shapes[column, first] = shape
        return shape

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
            return on_line(sorted(points), context)
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
            mean = _positive(mean_context)
            column = buckets.column(context_tokens=mean_context, batch=_count(batch))
            if column != (context, batch):
                raise ValueError(f"{mean_context} tokens are no mean of bucket {context}")
            table._bases[column] = Base(_positive(value), _count(samples), context=mean)
            table._seen_rows.add(buckets.rows_edge(_count(batch)))
        for context, batch, rows, value, samples in data["ratios"]:
            ratios = table._ratios.setdefault((_count(context), _count(batch)), {})
            ratios[_count(rows)] = Cell(_positive(value), _count(samples))
            table._seen_rows.add(_count(rows))
        return table


def _positive(value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value} is no cost")
    return float(value)


def _count(value: float) -> int:
    if not 1 <= value < math.inf:
        raise ValueError(f"{value} is no count")
    return int(value)


def _distance(column: Column, other: Column) -> tuple[float, float]:
    """Batches differ more than contexts do: they change which kernels run."""
    context, batch = (abs(math.log(a / b)) for a, b in zip(column, other, strict=True))
    return (batch, context)
