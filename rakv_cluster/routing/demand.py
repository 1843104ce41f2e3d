"""How many open requests want a chunk, as far as one router sent them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class Demand:
    """Counts by key, over the newest open requests with ``max_keys`` keys in all. Used by one
    thread."""

    def __init__(self, *, max_keys: int = 16384) -> None:
        self._max_keys = max_keys
        self._held = 0
        self._keys: OrderedDict[str, Sequence[bytes]] = OrderedDict()
        self._wanted: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Number of open requests that want any."""
        return len(self._keys)

    def add(self, request_id: str, keys: Sequence[bytes]) -> None:
        """A request that wants ``keys`` is open; one that is known already changes nothing."""
        if request_id in self._keys or not keys:
            return
        self._keys[request_id] = keys
        self._wanted.update(keys)
        self._held += len(keys)
        while self._held > self._max_keys:
            self.remove(next(iter(self._keys)))

    def remove(self, request_id: str) -> None:
        """A request has ended; one that is not known changes nothing."""
        keys = self._keys.pop(request_id, ())
        self._held -= len(keys)
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]

    def of(self, key: bytes) -> int:
        """Open requests that want ``key``."""
        return self._wanted[key]
