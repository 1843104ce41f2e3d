"""Which replicas will hold which keys, because they were just sent requests for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SLOTS = 16
_NOBODY = 0


class Predictions:
    """At most ``max_keys`` keys, newest kept, each with the replicas predicted for it.

    Chunks that many prompts begin with are sent to many replicas; each of them counts until it
    reports, else a document behind such a chunk would be known nowhere but on the replica that
    was sent one last. A row of two small tables per key, so that a request's chunks are looked up
    at once; of replicas whose indices are equal modulo 16, a key has the one predicted last.
    Replicas by index. Used by one thread.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        # Row 0 belongs to no key. Nothing is predicted until 0: zeros take no memory before use.
        self._until_s = np.zeros((max_keys + 1, _SLOTS))
        self._replicas = np.zeros((max_keys + 1, _SLOTS), dtype=np.intp)

    def __len__(self) -> int:
        return len(self._rows)

    def arranged(self, sources: Sequence[int]) -> Predictions:
        """The same for another list of replicas: each one's are those of ``sources``, none where
        that is -1."""
        other = Predictions(self._max_keys)
        other._rows = self._rows.copy()
        used = slice(1, len(self._rows) + 1)
        for index, source in enumerate(sources):
            until_s = self._until_s[used, source % _SLOTS]
            kept_s = other._until_s[used, index % _SLOTS]
            theirs = (self._replicas[used, source % _SLOTS] == source) & (until_s > kept_s)
            kept_s[theirs] = until_s[theirs]
            other._replicas[used, index % _SLOTS][theirs] = index
        return other

    def add(self, keys: Sequence[bytes], replica: int, until_s: float) -> None:
        """``replica`` is believed to hold ``keys`` until ``until_s``."""
        rows = [self._row(key) for key in keys]
        self._replicas[rows, replica % _SLOTS] = replica
        self._until_s[rows, replica % _SLOTS] = until_s

    def holders(
        self, keys: Sequence[bytes], now_s: float
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Pairs of a key's index and a replica's that is believed to hold it at ``now_s``."""
        found = (self._rows.get(key, _NOBODY) for key in keys)
        rows = np.fromiter(found, np.intp, len(keys))
        valid = self._until_s.take(rows, axis=0) > now_s
        return valid.nonzero()[0], self._replicas.take(rows, axis=0)[valid]

    def _row(self, key: bytes) -> int:
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
            return row
        full = len(self._rows) == self._max_keys
        row = self._rows.popitem(last=False)[1] if full else len(self._rows) + 1
        self._until_s[row] = 0.0
        self._rows[key] = row
        return row
