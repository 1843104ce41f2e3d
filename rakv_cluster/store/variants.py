"""Donors before variants: KV of one content in many places must not crowd out other contents.

A document that stands behind other text in every prompt leaves a record each time: exact reuse
needs each of them, but only for that very beginning, while one of them, the *donor*, serves blended
reuse anywhere. The others are *variants*. One that was hit is worth keeping as any record is; those
never hit may hold less than half of the budget together. Above that they leave first, the oldest
first, whatever the policy says (docs/adr/0026).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import closing

from rakv_cluster.store.donors import Donor, best_donor
from rakv_cluster.store.eviction import Entry, EvictionPolicy

_VARIANT_SHARE = 0.5


class BoundedVariants:
    """An :class:`EvictionPolicy` around another one that keeps variants within their share."""

    def __init__(self, inner: EvictionPolicy, budget_bytes: int) -> None:
        self._inner = inner
        self._allowed_bytes = budget_bytes * _VARIANT_SHARE
        self._by_content: dict[bytes, dict[bytes, Entry]] = {}
        self._donors: dict[bytes, bytes] = {}
        self._unhit: OrderedDict[bytes, int] = OrderedDict()  # variants and their sizes
        self._unhit_bytes = 0

    def insert(self, key: bytes, entry: Entry) -> None:
        self._inner.insert(key, entry)
        if entry.content:
            self._by_content.setdefault(entry.content, {})[key] = entry
            self._choose_donor(entry.content, key)

    def touch(self, key: bytes, entry: Entry) -> None:
        self._inner.touch(key, entry)
        self._release(key)

    def remove(self, key: bytes, entry: Entry, *, evicted: bool) -> None:
        self._inner.remove(key, entry, evicted=evicted)
        self._release(key)
        if not entry.content:
            return
        held = self._by_content[entry.content]
        del held[key]
        if not held:
            del self._by_content[entry.content], self._donors[entry.content]
        elif self._donors[entry.content] == key:
            del self._donors[entry.content]
            self._choose_donor(entry.content, next(iter(held)))

    def coldest_first(self) -> Generator[bytes, None, None]:
        first: set[bytes] = set()
        excess = self._unhit_bytes - self._allowed_bytes
        for key, size in self._unhit.items():
            if excess < 0:
                break
            excess -= size
            first.add(key)
            yield key
        with closing(self._inner.coldest_first()) as rest:
            for key in rest:
                if key not in first:
                    yield key

    def _choose_donor(self, content: bytes, candidate: bytes) -> None:
        """``candidate`` may become its content's donor; who is not is a variant."""
        held = self._by_content[content]
        before = self._donors.get(content)
        if before is None:
            donor = best_donor(Donor(key, entry.start) for key, entry in held.items()).key
        else:
            rivals = (before, candidate)
            donor = best_donor(Donor(key, held[key].start) for key in rivals).key
        self._donors[content] = donor
        self._release(donor)
        for key in (before, candidate):
            if key is not None and key != donor and not held[key].uses:
                self._hold(key, held[key].size_bytes)

    def _hold(self, key: bytes, size_bytes: int) -> None:
        if key not in self._unhit:
            self._unhit[key] = size_bytes
            self._unhit_bytes += size_bytes

    def _release(self, key: bytes) -> None:
        self._unhit_bytes -= self._unhit.pop(key, 0)
