"""Which keys a replica holds in RAM, small enough to send once a second: a Bloom filter.

A filter of 32,768 bits and 4 hashes over at most 2,048 keys claims an absent key with probability
``(1 - exp(-4 * 2048 / 32768)) ** 4 = 0.24%`` (Bloom, 1970). A false claim costs the router a wrong
estimate, never a wrong answer. Keys are sha256 digests, so their bytes serve as hashes; the first
eight place keys in the directory, the next eight are used here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rakv_cluster.chunking.keys import KEY_BYTES

BITS = 32768
HASHES = 4
CAPACITY = 2048
BYTES = BITS // 8
_EMPTY = bytes(BYTES)


def hash_rows(keys: Sequence[bytes]) -> npt.NDArray[np.uint16]:
    """The filter bits of each key, [len(keys), HASHES]."""
    words = np.frombuffer(b"".join(keys), dtype="<u2").reshape(len(keys), KEY_BYTES // 2)
    rows: npt.NDArray[np.uint16] = words[:, 4 : 4 + HASHES] & np.uint16(BITS - 1)
    return rows


def encode_hot_set(newest_first: Iterable[bytes]) -> bytes:
    """The filter of the first :data:`CAPACITY` keys, as :data:`BYTES` bytes."""
    keys = list(itertools.islice(newest_first, CAPACITY))
    bits = np.zeros(BITS, dtype=np.bool_)
    bits[hash_rows(keys).ravel()] = True
    return np.packbits(bits).tobytes()


class HotSets:
    """The filters of R replicas side by side, so that one key is looked up in all at once."""

    def __init__(self, replicas: int) -> None:
        self._table = np.zeros((BITS, replicas), dtype=np.bool_)
        self._encoded = [_EMPTY] * replicas

    def set(self, replica: int, encoded: bytes) -> None:
        """Take over a replica's filter; anything that is not one empties it."""
        encoded = encoded if len(encoded) == BYTES else _EMPTY
        before, after = (
            np.frombuffer(each, dtype=np.uint8) for each in (self._encoded[replica], encoded)
        )
        # Mostly few bits change, and a column of the table is spread over all of its memory.
        changed = np.flatnonzero(np.unpackbits(before ^ after))
        self._table[changed, replica] ^= True
        self._encoded[replica] = encoded

    def arranged(self, sources: Sequence[int]) -> HotSets:
        """Filters of other replicas: each one's is that of ``sources``, none where that is -1."""
        rearranged = HotSets(len(sources))
        kept = [index for index, source in enumerate(sources) if source >= 0]
        rearranged._table[:, kept] = self._table[:, [sources[index] for index in kept]]
        for index in kept:
            rearranged._encoded[index] = self._encoded[sources[index]]
        return rearranged

    def lookup(self, rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
        """[len(rows), R]: which of the keys with these :func:`hash_rows` a replica claims."""
        bits: npt.NDArray[np.bool_] = self._table.take(rows.T, axis=0)
        found: npt.NDArray[np.bool_] = np.logical_and.reduce(bits, axis=0)
        return found
