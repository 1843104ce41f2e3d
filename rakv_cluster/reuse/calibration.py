"""What blending costs in fidelity, measured per model, and which fraction meets a budget.

A :class:`Calibration` is a curve from the fraction of reused tokens that are repaired to the
divergence from full recompute, made by ``rakv calibrate``. A budget is compared with the upper
confidence bound of the 95th percentile over prompts. No single request is promised anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rakv_cluster.errors import ConfigError

MOST_REPAIRED = 0.6
"""Repairing more than this saves too little: such a request is computed exactly."""

_FORMAT = 3
"""Of what is kept. Another number means other figures: what was measured before kept positions
followed the repair says nothing now."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """At ``fraction`` of reused tokens repaired, over all prompts of a calibration.

    ``kl`` is nats per token from full recompute over 32 reference tokens, the mean over prompts;
    ``kl_p95`` its 95th percentile over prompts and ``kl_p95_upper`` that figure's upper 95% bound;
    ``top1`` the share of tokens with equal first choice; ``agreement`` how many of 32 greedy tokens
    stay equal up to the first difference, as a share. ``*_low`` and ``*_high`` are 95% bounds.
    """

    fraction: float
    kl: float
    kl_low: float
    kl_high: float
    kl_p95: float
    kl_p95_upper: float
    top1: float
    top1_low: float
    top1_high: float
    agreement: float
    agreement_low: float
    agreement_high: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A fraction to repair and the mean divergence expected of it; or why there is none.

    ``probed``: the question probe chooses what is repaired.
    """

    fraction: float
    expected_kl: float
    refusal: str = ""
    probed: bool = False


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model's curves by ascending fraction, where the question probe chooses (``probed``) and
    where it does not; empty: never calibrated, or not yet, which ``pending`` then says."""

    model_id: str = ""
    prompts: int = 0
    texts: str = ""
    points: tuple[CurvePoint, ...] = ()
    probed: tuple[CurvePoint, ...] = ()
    pending: str = ""

    def choose(self, max_kl: float, *, probed: bool = False) -> Choice:
        """The smallest measured fraction that meets ``max_kl`` and is worth blending for."""
        points = self._curve(probed=probed)
        if not points:
            return refused(self.pending or "this model is not calibrated: run `rakv calibrate`")
        for point in points:
            if point.fraction < MOST_REPAIRED and point.kl_p95_upper <= max_kl:
                return Choice(point.fraction, point.kl, probed=probed)
        best = min(
            (p.kl_p95_upper for p in points if p.fraction < MOST_REPAIRED),
            default=float("inf"),
        )
        return refused(
            f"max_kl {max_kl:g} is not met below {MOST_REPAIRED:.0%} recompute by this model's "
            f"calibration (best: {best:.3g})"
        )

    def expected_kl(self, fraction: float, *, probed: bool = False) -> float:
        """Mean divergence at ``fraction``, linear between measured ones; -1 if not calibrated."""
        points = self._curve(probed=probed)
        if not points:
            return -1.0
        below = [p for p in points if p.fraction <= fraction]
        above = [p for p in points if p.fraction >= fraction]
        if not below or not above:
            return (above[0] if above else below[-1]).kl
        left, right = below[-1], above[0]
        if left.fraction == right.fraction:
            return left.kl
        share = (fraction - left.fraction) / (right.fraction - left.fraction)
        return left.kl + share * (right.kl - left.kl)

    def _curve(self, *, probed: bool) -> tuple[CurvePoint, ...]:
        return self.probed if probed else self.points


def calibration_path(cache: Path, digest: bytes) -> Path:
    """Where a model's calibration is kept; ``digest`` is its card's."""
    return cache / "calibration" / f"{digest.hex()}.json"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it in one piece, over what is there; raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    data = asdict(calibration)
    del data["pending"]
    fresh.write_text(json.dumps({"format": _FORMAT, **data}, indent=1))
    fresh.replace(path)


def load_calibration(path: Path) -> Calibration:
    """What is kept at ``path``: an empty one if nothing is, or that of an older version.

    Raises :class:`ConfigError` for a file that is no calibration.
    """
    try:
        data = json.loads(path.read_text())
        found = int(data.pop("format"))
        if found < _FORMAT:
            return Calibration()
        if found > _FORMAT:
            raise ValueError(f"unknown format {found}")
        plain, probed = _points(data.pop("points")), _points(data.pop("probed"))
        return Calibration(**data, points=plain, probed=probed)
    except FileNotFoundError:
        return Calibration()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no calibration: {error}") from error


def _points(rows: Sequence[dict[str, float]]) -> tuple[CurvePoint, ...]:
    return tuple(sorted((CurvePoint(**row) for row in rows), key=lambda point: point.fraction))


def refused(reason: str) -> Choice:
    """No fraction, for that reason."""
    return Choice(1.0, 0.0, reason)
