"""What clients and shards say to each other, and the checks that an answer must pass.

Answers come from another process, which may be broken: each ``parse_*`` raises ``ValueError`` for
anything that is not what was promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from rakv_cluster.cluster.leases import Lease
from rakv_cluster.kv.codec import EncodedRecord
from rakv_cluster.store.base import Found, StoreStats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard as its clients need to know it.

    ``folder`` is on the shard's node. ``nodes`` are the live nodes with a shard, by the node
    manager's last word.
    """

    node: str
    folder: str
    incarnation: str
    pid: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of offering records: all were ``taken``, or what was left out and why."""

    taken: int
    dropped: int = 0
    refused: int = 0


def parse_info(value: object) -> ShardInfo:
    """A :class:`ShardInfo`."""
    return _checked(value, ShardInfo)


def parse_committed(value: object) -> Committed:
    """A :class:`Committed`."""
    return _checked(value, Committed)


def parse_stats(value: object) -> StoreStats:
    """A :class:`StoreStats`."""
    return _checked(value, StoreStats)


def parse_count(value: object) -> int:
    """A number of things."""
    return _checked(value, int)


def parse_keys(value: object) -> list[bytes]:
    """Keys."""
    keys = _checked(value, list)
    if not all(isinstance(key, bytes) for key in keys):
        raise ValueError("a key is not bytes")
    return keys


def parse_flag(value: object) -> bool:
    """Yes or no."""
    return _checked(value, bool)


def parse_locations(value: object) -> dict[bytes, tuple[str, ...]]:
    """Shards by key."""
    locations = _by_key(value, tuple)
    if not all(isinstance(shard, str) for shards in locations.values() for shard in shards):
        raise ValueError("a location is not the name of a node")
    return locations


def parse_found(value: object) -> dict[bytes, Found]:
    """Records by key."""
    return _by_key(value, Found)


def parse_records(value: object) -> dict[bytes, EncodedRecord]:
    """Encoded records by key. Their bytes are still to be verified."""
    records = _by_key(value, EncodedRecord)
    if any(key != record.key for key, record in records.items()):
        raise ValueError("a record is filed under another key")
    return records


def parse_leases(value: object) -> dict[bytes, Lease]:
    """Leases by key."""
    return _by_key(value, Lease)


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _by_key(value: object, kind: type[T]) -> dict[bytes, T]:
    rows = _checked(value, dict)
    if not all(isinstance(key, bytes) and isinstance(row, kind) for key, row in rows.items()):
        raise ValueError(f"expected {kind.__name__} by key")
    return dict(rows)
