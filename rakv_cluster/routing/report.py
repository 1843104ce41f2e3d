"""What a replica tells the routers about itself, once a second, as a small dictionary.

Routers trust nothing in it: a value that is missing, not a number, or outside what a machine can
do is unknown (NaN), and the router uses what is typical of the others instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rakv_cluster.routing.hot_set import BYTES

FORMAT = 1
BEAT_S = 3.0
MAX_PACES = 16
_DIGITS = 3

# Lowest and highest value that is believed, by field.
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "backlog_ms": (0.0, 3.6e6),
    "open_requests": (0.0, 1e5),
    "slots": (1.0, 1e5),
    "prefill_ms": (1e-4, 1e4),
    "prefill_slope_ms": (0.0, 1.0),
    "ram_ms": (0.0, 1e4),
    "disk_ms": (0.0, 1e4),
    "remote_ms": (0.0, 1e4),
    "chunk_ms": (0.0, 1e4),
    "token_ms": (1e-3, 1e5),
    "token_ms_slope": (0.0, 1e4),
    "hold_ms": (0.0, 3.6e6),
}
FIELDS = tuple(_NUMBERS)
_PLAUSIBLE = {**_NUMBERS, "at_s": (0.0, 1e11)}


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Load and measured costs of one replica; units as in :class:`~.score.Fleet`.

    ``pace`` is ms per emitted token by kind of work, at most :data:`MAX_PACES` kinds: what
    speculation brings depends on the text. ``hot`` is an encoded hot set, ``at_s`` when this was
    so, on the wall clock. NaN is "unknown".
    """

    backlog_ms: float = math.nan
    open_requests: float = math.nan
    slots: float = math.nan
    prefill_ms: float = math.nan
    prefill_slope_ms: float = math.nan
    ram_ms: float = math.nan
    disk_ms: float = math.nan
    remote_ms: float = math.nan
    chunk_ms: float = math.nan
    token_ms: float = math.nan
    token_ms_slope: float = math.nan
    hold_ms: float = math.nan
    pace: Mapping[str, float] = field(default_factory=dict)
    hot: bytes = b""
    at_s: float = math.nan

    def numbers(self) -> tuple[float, ...]:
        """The values of :data:`FIELDS`, in order."""
        return tuple(getattr(self, name) for name in FIELDS)


def encode_report(report: ReplicaReport, wall_s: float) -> dict[str, Any]:
    """As Serve carries it, with the time.

    Rounded: an idle replica mostly says the same again, and Serve then sends nothing. Its time
    moves on every :data:`BEAT_S`, by which routers tell an idle replica from a silent one.
    """
    idle = report.open_requests == 0 and report.backlog_ms == 0
    stats: dict[str, Any] = {name: _rounded(getattr(report, name)) for name in FIELDS}
    paces = sorted(report.pace.items())[:MAX_PACES]
    return {
        "format": FORMAT,
        "at_s": BEAT_S * int(wall_s / BEAT_S) if idle else round(wall_s, 2),
        **stats,
        "pace": {kind: _rounded(ms) for kind, ms in paces},
        "hot": report.hot,
    }


def decode_report(stats: object) -> ReplicaReport:
    """The believable part of what arrived; never raises."""
    if not isinstance(stats, Mapping) or stats.get("format") != FORMAT:
        return ReplicaReport()
    pace = stats.get("pace")
    kinds = list(pace.items())[:MAX_PACES] if isinstance(pace, Mapping) else []
    paces = {
        kind: ms
        for kind, value in kinds
        if isinstance(kind, str) and not math.isnan(ms := _believed("token_ms", value))
    }
    hot = stats.get("hot")
    return ReplicaReport(
        **{name: _believed(name, stats.get(name)) for name in FIELDS},
        pace=paces,
        hot=hot if isinstance(hot, bytes) and len(hot) == BYTES else b"",
        at_s=_believed("at_s", stats.get("at_s")),
    )


def _believed(name: str, value: object) -> float:
    low, high = _PLAUSIBLE[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if low <= value <= high else math.nan


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
