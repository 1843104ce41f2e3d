"""A store that holds nothing: the honest baseline, same code path as a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rakv_cluster.store.base import ChunkRecord, Found, Loaded, LoadItem, StoreStats
from rakv_cluster.types import Tier


class NullStore:
    """Finds nothing, takes nothing. ``counters`` say why, if it stands in for a real store."""

    def __init__(self, counters: Mapping[str, int] = MappingProxyType({})) -> None:
        self._counters = dict(counters)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        return {}

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        return [Loaded(ok=False, tier=Tier.RAM) for _ in items]

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        return {}

    def put(self, records: Sequence[ChunkRecord]) -> int:
        return 0

    def delete(self, keys: Sequence[bytes]) -> int:
        return 0

    def stats(self) -> StoreStats:
        return StoreStats(records=0, stored_bytes=0, budget_bytes=0, counters=self._counters)

    def close(self) -> None:
        return None
