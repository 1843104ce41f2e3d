"""A chunk store that fails as real ones do, and as none should.

Fault contract: a fault is drawn per call from ``draw`` (:func:`seeded_faults` repeats a run by its
seed). RAISE: the call raises. FORGET: nothing is found, loaded or taken. DELAY: ``delay()`` runs
before the call, which then works. FULL: ``put`` takes nothing, all else works. LIE: ``find``
reports records under wrong tokens and keys nobody asked for, ``donors`` exchanges
records, ``load`` scribbles over its targets and reports failure from some item on, ``put`` claims
success and keeps nothing. What no fault does is deliver other bytes as good ones: that is the one
promise of a store that a reader cannot check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np

from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import ChunkStore, Found, Loaded, LoadItem, StoreStats
from rakv_cluster.types import Tier


class Fault(Enum):
    """How one call goes wrong."""

    NONE = "none"
    RAISE = "raise"
    FORGET = "forget"
    DELAY = "delay"
    FULL = "full"
    LIE = "lie"


def seeded_faults(seed: int, weights: Mapping[Fault, float]) -> Callable[[], Fault]:
    """Draws of faults in proportion to their weights; equal seeds give equal draws."""
    draw = random.Random(seed)
    kinds, odds = list(weights), list(weights.values())
    return lambda: draw.choices(kinds, odds)[0]


class FaultyStore:
    """``inner`` behind the faults that ``draw`` decides on, one per call.

    ``delay`` is what a late call waits for: it moves a manual clock, or blocks on an event.
    """

    def __init__(
        self, inner: ChunkStore, draw: Callable[[], Fault], delay: Callable[[], None] = lambda: None
    ) -> None:
        self._inner = inner
        self._draw = draw
        self._delay = delay

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        fault = self._fault()
        if fault is Fault.FORGET:
            return {}
        found = self._inner.find(keys)
        if fault is Fault.LIE:
            lies = {
                key: replace(each, token_ids=each.token_ids[::-1]) for key, each in found.items()
            }
            return lies | {bytes(32): each for each in list(found.values())[:1]}
        return found

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        fault = self._fault()
        if fault is Fault.FORGET:
            return [Loaded(ok=False, tier=Tier.RAM) for _ in items]
        outcomes = self._inner.load(items)
        if fault is Fault.LIE:
            kept = len(items) // 2
            for item in items[kept:]:
                item.out.fill(np.iinfo(item.out.dtype).max)  # as bits, NaN
            return [*outcomes[:kept], Loaded(ok=False, tier=Tier.DISK)]
        return outcomes

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        fault = self._fault()
        if fault is Fault.FORGET:
            return {}
        known = self._inner.donors(contents)
        if fault is Fault.LIE:
            return dict(zip(known, reversed(known.values()), strict=True))
        return known

    def put(self, records: Sequence[ChunkRecord]) -> int:
        fault = self._fault()
        if fault is Fault.LIE:
            return len(records)
        return 0 if fault in (Fault.FORGET, Fault.FULL) else self._inner.put(records)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._fault()
        return self._inner.delete(keys)

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _fault(self) -> Fault:
        fault = self._draw()
        if fault is Fault.RAISE:
            raise StoreUnavailable("as the test asked")
        if fault is Fault.DELAY:
            self._delay()
        return fault
