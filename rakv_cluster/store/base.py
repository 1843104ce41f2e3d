"""The store's contract. Batched first; nothing here raises into a request.

A record is one chunk's KV under one key, with its token ids. Fault contract: a missing, damaged,
late or unreadable record is *absent* from :meth:`ChunkStore.find` or comes back from
:meth:`ChunkStore.load` as not loaded, and a counter says why. Bytes that come back are the bytes
that went in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.types import Tier

__all__ = [
    "ChunkRecord",
    "ChunkStore",
    "Described",
    "Found",
    "LoadItem",
    "Loaded",
    "StoreStats",
    "serves",
]


@dataclass(frozen=True, slots=True)
class Found:
    """What :meth:`ChunkStore.find` knows about a stored record without reading its KV.

    ``stored_bytes`` is what it takes of its tier's budget; the rest is as in the record that was
    put, so that a tier can hand it on to another. Of a record that is not ``lossless`` only
    approximate reuse may load anything, and no other tier gets it.
    """

    token_ids: tuple[int, ...]
    tier: Tier
    stored_bytes: int
    cost_ms: float
    numeric_class: str
    namespace: bytes
    start: int
    created_s: float
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class LoadItem:
    """Ask for the first ``len(token_ids)`` tokens of the record under ``key``.

    ``out`` receives the bits: ``[layers, 2, kv_heads, n, head_dim]``, writable, usually a slice
    of a sequence's buffer. Token ids that differ from the record's make it a miss, and so does a
    lossy record unless it ``may_be_lossy``: exact reuse gets the bits that were put, or none. So
    does a record of another class than ``numeric_class`` (empty: any will do), which may have taken
    the place of the one that was found.
    """

    key: bytes
    token_ids: tuple[int, ...]
    layout: KvLayout
    out: np.ndarray
    may_be_lossy: bool = False
    numeric_class: str = ""

    def accepts(self, stored: Stored) -> bool:
        """Whether a record's KV is what this item asks for."""
        return (
            stored.token_ids[: len(self.token_ids)] == tuple(self.token_ids)
            and stored.layout == self.layout
            and (stored.lossless or self.may_be_lossy)
            and self.numeric_class in ("", stored.numeric_class)
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Outcome of one :class:`LoadItem`; ``out`` is undefined unless ``ok``."""

    ok: bool
    tier: Tier
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since start and current sizes; one value per tier or shard."""

    records: int
    stored_bytes: int
    budget_bytes: int
    counters: Mapping[str, int]


class Described(Protocol):
    """What every description of a record has: a record, its head, an answer about it."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def numeric_class(self) -> str: ...

    @property
    def lossless(self) -> bool: ...


def serves(stored: Described, offered: Described) -> bool:
    """Whether a stored record already serves all that an offered one under the same key could.

    Records under a chunk's key always have equal tokens. An open tail gives way to a longer or a
    diverging one, never to a prefix of itself; a record of another numeric class gives way to the
    one in use, a lossy one to a lossless one.
    """
    return (
        stored.token_ids[: len(offered.token_ids)] == offered.token_ids
        and stored.numeric_class == offered.numeric_class
        and (stored.lossless or not offered.lossless)
    )


class Stored(Described, Protocol):
    """A record, or its head."""

    @property
    def layout(self) -> KvLayout: ...


class ChunkStore(Protocol):
    """A tier or a stack of tiers. Methods may be called from any thread."""

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Those of ``keys`` that are stored. Takes no lock or pin that outlives the call."""
        ...

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        """Read KV into each item's ``out``; one outcome per item, in order."""
        ...

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        """For those content keys that some record near by can serve, that record's own key.

        Near by: in this process or on this node. See :mod:`rakv_cluster.store.donors`.
        """
        ...

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """Offer records; returns how many were taken (a full or broken store takes none)."""
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove records; returns how many were there."""
        ...

    def stats(self) -> StoreStats:
        """Counters and sizes."""
        ...

    def close(self) -> None:
        """Flush and release everything; the store is not used afterwards."""
        ...
