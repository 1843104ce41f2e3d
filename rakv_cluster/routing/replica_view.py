"""What one router knows of the replicas: their reports, aged, and what it sent them itself.

Staleness rules. Backlog fades and is doubted (see :mod:`.loads`). Costs, hot sets and requests that
others sent are used for ``forget_s`` after the last report, then forgotten. A cost that a replica
does not report is taken to be the median of the others'; one that nobody reports has a default.
What a replica without work claims is doubted the longer, the more it is above the others'
(docs/adr/0098).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rakv_cluster.routing.doubt import doubted, typical
from rakv_cluster.routing.loads import Loads, LoadSettings
from rakv_cluster.routing.locations import Locations, LocationSettings
from rakv_cluster.routing.report import FIELDS, ReplicaReport
from rakv_cluster.routing.score import Fleet, Floats

_MAX_KINDS = 64
_COSTS = FIELDS[FIELDS.index("slots") :]
_NEEDED = ("prefill_ms", "token_ms")
# Where no replica says: loading gains nothing, and what grows with load does not.
_DEFAULTS: Mapping[str, float] = {
    "slots": 1.0, "prefill_slope_ms": 0.0, "chunk_ms": 0.0, "token_ms_slope": 0.0,
    "hold_ms": 0.0,
}  # fmt: skip
_USUAL_FOR_S = 1.0
_SLOTS = _COSTS.index("slots")


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """See the module's staleness rules; :func:`~.doubt.doubted` takes ``doubt_s``."""

    forget_s: float = 60.0
    doubt_s: float = 10.0
    loads: LoadSettings = field(default_factory=LoadSettings)
    locations: LocationSettings = field(default_factory=LocationSettings)


class ReplicaView:
    """Replicas by index in ``ids``. Memory is bounded by replicas and settings. One thread."""

    def __init__(self, settings: ViewSettings, now_s: float) -> None:
        self._settings = settings
        self.ids: tuple[str, ...] = ()
        self.index: dict[str, int] = {}
        self._nodes: tuple[str, ...] = ()
        self._said: Floats = np.empty((len(_COSTS), 0))
        self._said_at_s: Floats = np.empty(0)
        self._filled: dict[str, Floats] = {}
        self._paces: OrderedDict[str, Floats] = OrderedDict()
        self._measured = False
        self._oldest_s = now_s
        # What costs and paces usually are, computed now and then.
        self._usual: Floats = np.full(len(_COSTS), np.nan)
        self._usual_paces: dict[str, Floats] = {}
        self._usual_at_s = -math.inf
        self.loads = Loads(0, settings.loads, now_s)
        self.locations = Locations((), settings.locations)

    @property
    def kinds(self) -> int:
        """Number of kinds of work with a pace."""
        return len(self._paces)

    def set_replicas(self, nodes: Mapping[str, str], now_s: float) -> None:
        """The replicas there are, with their nodes; what is known of others is forgotten."""
        ids = tuple(nodes)
        if ids == self.ids and tuple(nodes.values()) == self._nodes:
            return
        sources = [self.index.get(replica, -1) for replica in ids]
        said = np.full((len(_COSTS), len(ids)), np.nan)
        said_at_s = np.full(len(ids), now_s)
        kept = [index for index, source in enumerate(sources) if source >= 0]
        taken = [sources[index] for index in kept]
        said[:, kept] = self._said[:, taken]
        said_at_s[kept] = self._said_at_s[taken]
        for kind, before in self._paces.items():
            pace = np.full(len(ids), np.nan)
            pace[kept] = before[taken]
            self._paces[kind] = pace
        self._said, self._said_at_s = said, said_at_s
        self.loads = self.loads.arranged(sources, now_s)
        self.locations = self.locations.arranged(tuple(nodes.values()), sources)
        self.ids, self._nodes = ids, tuple(nodes.values())
        self.index = {replica: index for index, replica in enumerate(ids)}
        self._fill()

    def report(self, replica: str, report: ReplicaReport, age_s: float, now_s: float) -> None:
        """A replica's report arrived, ``age_s`` after it was made (NaN: who knows); of one that
        is gone, nothing is kept."""
        index = self.index.get(replica)
        if index is None:
            return
        self.loads.report(index, report.backlog_ms, report.open_requests, age_s, now_s)
        self.locations.report(index, report.hot)
        costs, paces = self._believed(report, index, now_s)
        self._said_at_s[index] = now_s
        for kind, pace in self._paces.items():
            if kind not in paces:
                pace[index] = np.nan
        for kind, ms in paces.items():
            self._set_pace(kind, index, ms)
        if self._measured and not np.isnan(costs).any():
            self._said[:, index] = costs
            for name, value in zip(_COSTS, costs, strict=True):
                self._filled[name][index] = value
        else:
            self._said[:, index] = costs
            self._fill()

    def fleet(self, kind: str, now_s: float) -> Fleet:
        """Everything about all replicas, for a request of that kind."""
        if self.ids and now_s - self._oldest_s > self._settings.forget_s:
            self._forget(now_s)
        pace = self._paces.get(kind)
        token_ms = self._filled["token_ms"]
        costs = dict(self._filled)
        if pace is not None:
            costs["token_ms"] = np.where(np.isnan(pace), token_ms, pace)
        return Fleet(
            backlog_ms=self.loads.backlog_ms(now_s),
            recurring_ms=self.loads.recurring_ms(now_s),
            open_requests=self.loads.open_requests(now_s),
            measured=self._measured,
            **costs,
        )

    def _believed(
        self, report: ReplicaReport, index: int, now_s: float
    ) -> tuple[Floats, Mapping[str, float]]:
        """Costs and paces out of a report, see :func:`~.doubt.doubted`."""
        costs = np.asarray(report.numbers()[-len(_COSTS) :])
        idle_s = self.loads.idle_s(index, now_s)
        if idle_s <= 0:
            return costs, report.pace
        if now_s - self._usual_at_s > _USUAL_FOR_S:
            self._usual = typical(self._said)
            self._usual[_SLOTS] = np.nan  # not a cost
            self._usual_paces = {kind: typical(pace) for kind, pace in self._paces.items()}
            self._usual_at_s = now_s
        doubt_s = self._settings.doubt_s
        unknown = np.array(np.nan)
        paces = {
            kind: float(
                doubted(np.array(ms), self._usual_paces.get(kind, unknown), idle_s, doubt_s)
            )
            for kind, ms in report.pace.items()
        }
        return doubted(costs, self._usual, idle_s, doubt_s), paces

    def _set_pace(self, kind: str, index: int, ms: float) -> None:
        if kind not in self._paces:
            while len(self._paces) >= _MAX_KINDS:
                self._paces.popitem(last=False)
            self._paces[kind] = np.full(len(self.ids), np.nan)
        self._paces.move_to_end(kind)
        self._paces[kind][index] = ms

    def _forget(self, now_s: float) -> None:
        """Drop what replicas said that have been silent for too long."""
        silent = np.flatnonzero(now_s - self._said_at_s > self._settings.forget_s)
        self._said[:, silent] = np.nan
        for pace in self._paces.values():
            pace[silent] = np.nan
        for index in silent:
            self.locations.report(int(index), b"")
            self.loads.forget(int(index))
        heard = np.delete(self._said_at_s, silent)
        self._oldest_s = float(heard.min()) if len(heard) else now_s
        self._fill()

    def _fill(self) -> None:
        """Complete costs from what was said."""
        typical = {
            name: float(np.median(values[~np.isnan(values)])) if (~np.isnan(values)).any()
            else np.nan
            for name, values in zip(_COSTS, self._said, strict=True)
        }  # fmt: skip
        self._measured = not any(np.isnan(typical[name]) for name in _NEEDED)
        for name, values in zip(_COSTS, self._said, strict=True):
            value = typical[name]
            if np.isnan(value):
                value = _DEFAULTS.get(name, typical["prefill_ms"])
            self._filled[name] = np.where(np.isnan(values), value, values)
