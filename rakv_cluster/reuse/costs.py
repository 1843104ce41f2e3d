"""Measured costs of computing and of loading KV, and frozen views of them for pure policies.

Computing is a table by (rows of a step, context), because kernels switch and no linear model fits
(DESIGN.md section 8); an empty cell answers from its nearest neighbour. Loading is a rate per
tier. Everything is an exponentially weighted mean; a load estimate drifts back to its prior, so
that one slow read does not forbid a tier for ever. A load that had to be given up costs as much as
computing: after each one in a row the tier is tried again half as soon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rakv_cluster.types import Tier

_LEARNING_RATE = 0.2
_OUTLIER_FACTOR = 4.0
_FORGET_HALF_LIFE_S = 60.0
_LONGEST_HALF_LIFE_S = 3600.0
_CONTEXT_BUCKET_TOKENS = 512
_BYTES_PER_MB = 1e6

_LOAD_PRIOR_MS_PER_MB: Mapping[Tier, float] = {
    Tier.RAM: 0.5,
    Tier.DISK: 2.5,
    Tier.REMOTE: 8.0,
}
LOAD_FIXED_MS = 0.3
"""Per load, whatever its size: a thread hop, a transaction."""


def _row_bucket(rows: int) -> int:
    return max(rows, 1).bit_length()


def _context_bucket(tokens: int) -> int:
    """0 below one bucket's width, then one more for each doubling."""
    return (tokens // _CONTEXT_BUCKET_TOKENS).bit_length()


def _blend(old: float, new: float) -> float:
    """One EWMA step; a sample far above the mean counts as a moderate one."""
    return old + _LEARNING_RATE * (min(new, _OUTLIER_FACTOR * old) - old)


@dataclass(frozen=True, slots=True)
class CostView:
    """Costs as known at one moment. Immutable: policies read it, any thread may hold it."""

    prefill_ms_per_token: Mapping[tuple[int, int], float]
    decode_step_ms: Mapping[int, float]
    load_ms_per_mb: Mapping[Tier, float]
    step_tokens: int

    def prefill_rate_ms(self, rows: int, context: int) -> float:
        """Milliseconds per token for a step of ``rows`` prompt tokens at ``context`` tokens."""
        row, depth = _row_bucket(rows), _context_bucket(context)
        cell = min(
            self.prefill_ms_per_token, key=lambda k: (abs(k[0] - row) + abs(k[1] - depth), k)
        )
        return self.prefill_ms_per_token[cell]

    def prefill_ms(self, start: int, stop: int) -> float:
        """Milliseconds to compute the tokens at positions ``[start, stop)``, nothing else running.

        A pass over few rows costs what reading the weights costs, so it is never cheaper than a
        one-row step.
        """
        total = 0.0
        for begin in range(start, stop, self.step_tokens):
            rows = min(self.step_tokens, stop - begin)
            total += max(rows * self.prefill_rate_ms(rows, begin), self.decode_ms(1))
        return total

    def decode_ms(self, rows: int) -> float:
        """Milliseconds of a step of ``rows`` sequences with one token each."""
        bucket = _row_bucket(rows)
        return self.decode_step_ms[min(self.decode_step_ms, key=lambda k: (abs(k - bucket), k))]

    def load_ms(self, tier: Tier, stored_bytes: int) -> float:
        """Milliseconds to load one record."""
        return LOAD_FIXED_MS + self.load_ms_per_mb[tier] * stored_bytes / _BYTES_PER_MB


@dataclass(slots=True)
class _LoadRate:
    ms_per_mb: float
    at_s: float
    half_life_s: float = _FORGET_HALF_LIFE_S


@dataclass(slots=True)
class Costs:
    """The estimator behind :class:`CostView`. Owned by one thread."""

    step_tokens: int
    _prefill: dict[tuple[int, int], float] = field(default_factory=dict)
    _decode: dict[int, float] = field(default_factory=dict)
    _loads: dict[Tier, _LoadRate] = field(default_factory=dict)

    def observe_prefill(self, start: int, rows: int, ms: float) -> None:
        """A step computed ``rows`` prompt tokens from position ``start`` in ``ms``.

        Nothing is learned from no time at all (streams beside the prompt seemed to take it all):
        a rate of zero would promise endless rows.
        """
        if rows > 0 and ms > 0:
            _learn(self._prefill, (_row_bucket(rows), _context_bucket(start)), ms / rows)

    def observe_decode(self, rows: int, ms: float) -> None:
        """A step of ``rows`` one-token sequences took ``ms``."""
        _learn(self._decode, _row_bucket(rows), ms)

    def observe_load(self, tier: Tier, stored_bytes: int, ms: float, now_s: float) -> None:
        """Loading ``stored_bytes`` from ``tier`` took ``ms``."""
        known = self._load_rate(tier, now_s)
        # No outlier clipping here: a disk that stalls has to be believed at once.
        sample = _load_sample(stored_bytes, ms)
        self._loads[tier] = _LoadRate(known + 0.5 * (sample - known), now_s)

    def observe_stuck_load(self, tier: Tier, stored_bytes: int, ms: float, now_s: float) -> None:
        """Loading ``stored_bytes`` from ``tier`` was given up after ``ms``: it takes longer."""
        known = self._loads.get(tier)
        half_life_s = _FORGET_HALF_LIFE_S if known is None else 2 * known.half_life_s
        rate = max(self._load_rate(tier, now_s), _load_sample(stored_bytes, ms))
        self._loads[tier] = _LoadRate(rate, now_s, min(half_life_s, _LONGEST_HALF_LIFE_S))

    def view(self, now_s: float) -> CostView:
        """The costs as of ``now_s``."""
        return CostView(
            prefill_ms_per_token=dict(self._prefill) or {(1, 0): 1.0},
            decode_step_ms=dict(self._decode) or {1: 1.0},
            load_ms_per_mb={tier: self._load_rate(tier, now_s) for tier in Tier},
            step_tokens=self.step_tokens,
        )

    def _load_rate(self, tier: Tier, now_s: float) -> float:
        prior = _LOAD_PRIOR_MS_PER_MB[tier]
        known = self._loads.get(tier)
        if known is None:
            return prior
        memory: float = 0.5 ** (max(now_s - known.at_s, 0.0) / known.half_life_s)
        return prior + (known.ms_per_mb - prior) * memory


def _load_sample(stored_bytes: int, ms: float) -> float:
    """Milliseconds per megabyte of one load."""
    return max(ms - LOAD_FIXED_MS, 0.0) / max(stored_bytes / _BYTES_PER_MB, 0.05)


def _learn(table: dict, key: object, sample: float) -> None:  # type: ignore[type-arg]  # two key types
    known = table.get(key)
    table[key] = sample if known is None else _blend(known, sample)
