"""What a tier holds, within its byte budget: metadata only, shared by RAM and disk tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rakv_cluster.store.eviction import Entry, EvictionPolicy


class Catalog:
    """Entries by key, their exact total size, and who must leave to make room. Not thread-safe."""

    def __init__(self, budget_bytes: int, policy: EvictionPolicy) -> None:
        self.budget_bytes = budget_bytes
        self._policy = policy
        self._entries: dict[bytes, Entry] = {}
        self._used_bytes = 0

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

    def add(self, key: bytes, entry: Entry) -> None:
        """Record a new entry; raises ``KeyError`` if ``key`` is known."""
        if key in self._entries:
            raise KeyError(key)
        self._entries[key] = entry
        self._used_bytes += entry.size_bytes
        self._policy.insert(key, entry)

    def remove(self, key: bytes, *, evicted: bool = False) -> Entry:
        """Forget an entry and return it; raises ``KeyError`` if there is none."""
        entry = self._entries.pop(key)
        self._used_bytes -= entry.size_bytes
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

    def victims(self, incoming_bytes: int, *, spare: Iterable[bytes] = ()) -> list[bytes]:
        """Keys that must leave so that ``incoming_bytes`` more fit the budget; changes nothing.

        ``spare`` never leaves; if that makes room impossible, the list is as long as it can be.
        """
        excess = self._used_bytes + incoming_bytes - self.budget_bytes
        return self._coldest(excess, frozenset(spare)) if excess > 0 else []

    def _coldest(self, need_bytes: int, spared: frozenset[bytes]) -> list[bytes]:
        chosen: list[bytes] = []
        for key in self._policy.coldest_first():
            if need_bytes <= 0:
                break
            if key not in spared:
                chosen.append(key)
                need_bytes -= self._entries[key].size_bytes
        return chosen
