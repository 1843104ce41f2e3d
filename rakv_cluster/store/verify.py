"""Check a shard on disk, record by record, without changing it.

Also a program, ``python -m rakv_cluster.store.verify FOLDER``: a damaged environment may kill the
process that maps it, so a writer that has reason to doubt one has it looked at from here first.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import lmdb
import numpy as np

from rakv_cluster.errors import CorruptRecord, StoreError
from rakv_cluster.kv.codec import verify_body
from rakv_cluster.store.generation import Generation, get_head, read_body, read_index
from rakv_cluster.store.shard_reader import FollowedFolder


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a shard holds. ``damaged`` keys are misses; the rest of the shard is usable."""

    records: int
    stored_bytes: int
    tokens: int
    damaged: tuple[bytes, ...]
    unindexed: int

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damaged and not self.unindexed


def verify_shard(path: str | os.PathLike[str]) -> ShardReport:
    """Read and verify every record; works beside a live writer, on one moment's state.

    Not in a process that has the shard open itself. Raises ``StoreUnavailable`` if there is no
    usable environment, ``CorruptRecord`` if its tables cannot be read.
    """
    folder = FollowedFolder(path)
    try:
        with folder.lease() as generation, generation.env.begin(buffers=True) as txn:
            return _verify(generation, txn)
    except lmdb.Error as error:
        raise CorruptRecord(f"{path} is damaged: {error}") from error
    finally:
        folder.close()


def _verify(generation: Generation, txn: Any) -> ShardReport:
    damaged: list[bytes] = []
    stored_bytes = tokens = 0
    indexed: set[bytes] = set()
    for key, record_id, entry in read_index(generation, txn):
        indexed.add(key)
        try:
            stored = get_head(generation, txn, key)
            if stored is None or stored.record_id != record_id:
                raise CorruptRecord("index and head disagree")
            body = np.empty(stored.head.body_bytes, np.uint8)
            read_body(generation, txn, stored, body)
            verify_body(stored.head, body.data)
        except CorruptRecord:
            damaged.append(key)
            continue
        stored_bytes += entry.size_bytes
        tokens += len(stored.head.token_ids)
    with txn.cursor(db=generation.heads) as cursor:
        unindexed = sum(bytes(key) not in indexed for key in cursor.iternext(values=False))
    return ShardReport(len(indexed) - len(damaged), stored_bytes, tokens, tuple(damaged), unindexed)


def main(argv: list[str]) -> int:
    """Exit status 0 if a shard is whole, 1 if records are damaged, 2 if it cannot be read."""
    try:
        report = verify_shard(argv[0])
    except StoreError as error:
        print(f"unusable: {error}")
        return 2
    print(f"{report.records} records, {report.stored_bytes} bytes, {len(report.damaged)} damaged")
    for key in report.damaged:
        print(f"damaged: {key.hex()}")
    if report.unindexed:
        print(f"{report.unindexed} records are not in the index")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
