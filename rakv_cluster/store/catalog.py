"""What a tier holds, within its byte budget: metadata only, shared by RAM and disk tiers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import accumulate

from rakv_cluster.store.eviction import Arc, Entry, PolicyFactory
from rakv_cluster.store.variants import BoundedVariants


class Catalog:
    """Entries by key, their exact sizes, and who must leave to make room. Not thread-safe.

    ``quota_bytes`` bounds what one namespace may take (0: the whole budget).
    """

    def __init__(
        self, budget_bytes: int, policy: PolicyFactory = Arc, *, quota_bytes: int = 0
    ) -> None:
        self.budget_bytes = budget_bytes
        self.quota_bytes = quota_bytes
        self._policy = BoundedVariants(policy(budget_bytes), budget_bytes)
        self._entries: dict[bytes, Entry] = {}
        self._used_bytes = 0
        self._namespace_bytes: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def __getitem__(self, key: bytes) -> Entry:
        return self._entries[key]

    @property
    def used_bytes(self) -> int:
        """Total size of all entries."""
        return self._used_bytes

    def namespace_bytes(self) -> dict[bytes, int]:
        """Total size of each namespace's entries."""
        return dict(self._namespace_bytes)

    def matching(self, wanted: Callable[[Entry], bool]) -> list[bytes]:
        """Keys of the entries that ``wanted`` accepts."""
        return [key for key, entry in self._entries.items() if wanted(entry)]

    def newest(self, count: int) -> list[bytes]:
        """The ``count`` keys used last, newest first."""
        return heapq.nlargest(count, self._entries, key=lambda key: self._entries[key].last_use_s)

    def hottest(self, limit: int, limit_bytes: int) -> list[bytes]:
        """At most ``limit`` keys of together at most ``limit_bytes``, those used last first.

        Of a prompt's chunks, which are used together, the earliest come first.
        """
        order = heapq.nsmallest(
            limit,
            self._entries,
            key=lambda key: (-self._entries[key].last_use_s, self._entries[key].start),
        )
        sizes = accumulate(self._entries[key].size_bytes for key in order)
        return [key for key, total in zip(order, sizes, strict=True) if total <= limit_bytes]

    def add(self, key: bytes, entry: Entry) -> None:
        """Record a new entry; raises ``KeyError`` if ``key`` is known."""
        if key in self._entries:
            raise KeyError(key)
        self._entries[key] = entry
        self._used_bytes += entry.size_bytes
        self._namespace_bytes[entry.namespace] += entry.size_bytes
        self._policy.insert(key, entry)

    def remove(self, key: bytes, *, evicted: bool = False) -> Entry:
        """Forget an entry and return it; raises ``KeyError`` if there is none."""
        entry = self._entries.pop(key)
        self._used_bytes -= entry.size_bytes
        self._namespace_bytes[entry.namespace] -= entry.size_bytes
        if not self._namespace_bytes[entry.namespace]:
            del self._namespace_bytes[entry.namespace]
        self._policy.remove(key, entry, evicted=evicted)
        return entry

    def touch(self, keys: Iterable[bytes], now_s: float) -> None:
        """Count a use of each known key.

        A later chunk of a prompt is worth nothing without the earlier ones, so the earliest is
        touched last: it then leaves after those that need it.
        """
        known = [key for key in keys if key in self._entries]
        for key in sorted(known, key=lambda key: -self._entries[key].start):
            entry = self._entries[key]
            entry.uses += 1
            entry.last_use_s = max(entry.last_use_s, now_s)
            self._policy.touch(key, entry)

    def victims(
        self, incoming: Mapping[bytes, int], *, spare: Container[bytes] = ()
    ) -> list[bytes]:
        """Keys that must leave so that ``incoming`` (bytes by namespace) fits; changes nothing.

        First namespaces are brought within the quota, then the whole within the budget. ``spare``
        never leaves; if that makes room impossible, the list is as long as it can be.
        """
        chosen: dict[bytes, None] = {}
        if self.quota_bytes:
            for namespace, size in incoming.items():
                excess = self._namespace_bytes[namespace] + size - self.quota_bytes
                self._choose(excess, spare, chosen, namespace)
        leaving = sum(self._entries[key].size_bytes for key in chosen)
        excess = self._used_bytes - leaving + sum(incoming.values()) - self.budget_bytes
        self._choose(excess, spare, chosen, None)
        return list(chosen)

    def fits(self, incoming: Mapping[bytes, int], leaving: Iterable[bytes]) -> bool:
        """Whether budget and quota hold once ``leaving`` is gone and ``incoming`` is there."""
        change = Counter(incoming)
        for key in leaving:
            change[self._entries[key].namespace] -= self._entries[key].size_bytes
        if self.quota_bytes and any(
            size > 0 and self._namespace_bytes[namespace] + size > self.quota_bytes
            for namespace, size in change.items()
        ):
            return False
        return self._used_bytes + sum(change.values()) <= self.budget_bytes

    def _choose(
        self,
        need_bytes: int,
        spare: Container[bytes],
        chosen: dict[bytes, None],
        namespace: bytes | None,
    ) -> None:
        """Add the coldest entries (of one namespace, if given) to ``chosen`` until enough leave."""
        if need_bytes <= 0:
            return
        with closing(self._policy.coldest_first()) as order:
            for key in order:
                entry = self._entries[key]
                if key in chosen or key in spare or namespace not in (None, entry.namespace):
                    continue
                chosen[key] = None
                need_bytes -= entry.size_bytes
                if need_bytes <= 0:
                    return
