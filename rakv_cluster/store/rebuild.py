"""Copy a generation's intact records into a fresh one: compaction, resizing, salvage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.codec import parse_head, verify_body
from rakv_cluster.store.eviction import Entry
from rakv_cluster.store.generation import (
    Generation,
    get_encoded,
    put_pin,
    put_record,
    read_index,
    read_pins,
)

_TRANSACTION_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy took along and what it left behind because it was damaged."""

    records: int
    damaged: int


def copy_records(source: Generation, target: Generation) -> Copied:
    """Copy records in the order of their last use, with uses and pins, verifying each.

    ``target`` is empty. Raises ``lmdb.Error`` when it cannot be written.
    """
    damaged = 0
    record_id = 0
    with source.env.begin(buffers=True) as reading:
        rows = sorted(read_index(source, reading), key=lambda row: row[2].last_use_s)
        pins: dict[bytes, list[tuple[str, float]]] = {}
        for key, owner, until_s in read_pins(source, reading):
            pins.setdefault(key, []).append((owner, until_s))
        entries = {key: entry for key, _, entry in rows}
        for batch in _batches(entries):
            with target.env.begin(write=True) as writing:
                for key in batch:
                    try:
                        record = get_encoded(source, reading, key)
                        if record is None:
                            raise CorruptRecord("indexed record has no head")
                        verify_body(parse_head(record.head), record.body)
                    except CorruptRecord:
                        damaged += 1
                        continue
                    record_id += 1
                    put_record(target, writing, record_id, record, entries[key])
                    for owner, until_s in pins.get(key, ()):
                        put_pin(target, writing, key, owner, until_s)
            target.cover_used_pages()
    return Copied(record_id, damaged)


def _batches(entries: Mapping[bytes, Entry]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    total = 0
    for key, entry in entries.items():
        batch.append(key)
        total += entry.size_bytes
        if total >= _TRANSACTION_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
