"""A chunk store that fails as real ones do, and as none should.

Fault contract: a fault is drawn per call from ``draw``. RAISE: the call raises. FORGET: nothing is
found, loaded or taken. LIE: ``find`` reports records under wrong tokens and keys nobody asked for,
``load`` scribbles over its targets and reports failure from some item on, ``put`` claims success
and keeps nothing. What no fault does is deliver other bytes as good ones: that is the one promise
of a store that a reader cannot check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    LIE = "lie"


class FaultyStore:
    """``inner`` behind the faults that ``draw`` decides on, one per call."""

    def __init__(self, inner: ChunkStore, draw: Callable[[], Fault]) -> None:
        self._inner = inner
        self._draw = draw

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

    def put(self, records: Sequence[ChunkRecord]) -> int:
        fault = self._fault()
        if fault is Fault.LIE:
            return len(records)
        return 0 if fault is Fault.FORGET else self._inner.put(records)

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
        return fault
