"""What an operator does to a shard's folder while no service has it open."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from rakv_cluster.clock import Clock
from rakv_cluster.errors import ConfigError, CorruptRecord, StoreUnavailable
from rakv_cluster.kv.codec import EncodedRecord, parse_head, verify_body
from rakv_cluster.store.archive import read_archive, write_archive
from rakv_cluster.store.folder import DATA_FILE, ShardFolder, check_data_file
from rakv_cluster.store.generation import read_index, read_pins
from rakv_cluster.store.shard_reader import FollowedFolder, ShardReader
from rakv_cluster.store.shard_writer import ShardSettings, ShardWriter

_BATCH_KEYS = 64
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """A shard's size: ``stored_bytes`` is charged to the budget, ``file_bytes`` is on the disk.

    ``namespaces`` gives the stored bytes of each namespace (one per model and tenant).
    """

    records: int
    tokens: int
    stored_bytes: int
    budget_bytes: int
    file_bytes: int
    pins: int
    namespaces: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class Exported:
    """Records written to an archive, and those left out because they are damaged."""

    records: int
    damaged: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of an archive's records; ``evicted`` others left the shard for them."""

    stored: int
    duplicates: int
    refused: int
    evicted: int


def summarize_shard(path: Path) -> ShardSummary:
    """Sizes from the index, without reading any KV; works beside a live writer.

    Raises ``StoreUnavailable`` or ``CorruptRecord``.
    """
    data_file, budget_bytes = _existing(path)
    namespaces: Counter[bytes] = Counter()
    records = tokens = 0
    folder = FollowedFolder(path)
    try:
        with folder.lease() as generation, generation.env.begin() as txn:
            for _, _, entry in read_index(generation, txn):
                records += 1
                tokens += entry.tokens
                namespaces[entry.namespace] += entry.size_bytes
            pins = sum(1 for _ in read_pins(generation, txn))
    except lmdb.Error as error:
        raise CorruptRecord(f"{path} cannot be read: {error}") from error
    finally:
        folder.close()
    file_bytes = data_file.stat().st_size
    return ShardSummary(
        records, tokens, namespaces.total(), budget_bytes, file_bytes, pins, dict(namespaces)
    )


@contextmanager
def open_shard(path: Path, clock: Clock) -> Iterator[ShardWriter]:
    """The writer of an existing shard, with the budget that it has: opening it evicts nothing.

    Raises ``StoreUnavailable`` where there is none, ``CorruptRecord`` for one that a service would
    move aside, ``WriterFenced`` while a service has it open.
    """
    _, budget_bytes = _existing(path)
    with _writer(path, budget_bytes, clock) as writer:
        yield writer


def clear_shard(writer: ShardWriter) -> int:
    """Remove every record and give the disk back; returns how many records there were.

    Raises ``StoreUnavailable`` when the disk refuses.
    """
    keys = writer.keys()
    for start in range(0, len(keys), _BATCH_KEYS):
        batch = keys[start : start + _BATCH_KEYS]
        if writer.delete(batch) != len(batch):
            raise StoreUnavailable("the shard refused to delete; is its disk full?")
    writer.compact()
    return len(keys)


def export_shard(path: Path, archive: Path) -> Exported:
    """Write all intact records to a new file, which appears when it is complete.

    Works beside a live writer. Raises ``ConfigError`` if the file exists, ``StoreUnavailable`` if
    it cannot be written or there is no shard.
    """
    _existing(path)
    if archive.exists():
        raise ConfigError(f"{archive} exists already", field="archive")
    partial = archive.with_name(archive.name + ".part")
    reader = ShardReader(path)
    damaged: list[bytes] = []
    try:
        with partial.open("wb") as file:
            records = write_archive(_intact(reader, damaged), file)
        if reader.counters()["disk_read_errors"]:
            # To a service a read that failed is a miss; here it would be a record lost.
            raise StoreUnavailable(f"{path} could not be read to its end")
        os.replace(partial, archive)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {archive}: {error.strerror}") from error
    finally:
        reader.close()
        partial.unlink(missing_ok=True)
    return Exported(records, len(damaged))


def import_archive(path: Path, archive: Path, clock: Clock, *, new_budget_bytes: int) -> Imported:
    """Store an archive's records; ``new_budget_bytes`` is for a folder that holds no shard yet.

    Raises as :func:`open_shard`; ``ConfigError`` if the file cannot be read; ``CorruptRecord`` at
    its first damage: the records before that are stored.
    """
    exists = ShardFolder(path).current() is not None
    budget_bytes = _existing(path)[1] if exists else new_budget_bytes
    stored = duplicates = refused = evicted = 0
    try:
        with archive.open("rb") as file, _writer(path, budget_bytes, clock) as writer:
            for batch in _batches(read_archive(file)):
                result = writer.commit(batch)
                stored += len(result.stored)
                duplicates += result.duplicates
                refused += result.refused
                evicted += len(result.evicted)
    except OSError as error:
        raise ConfigError(f"{archive} cannot be read: {error.strerror}", field="archive") from error
    return Imported(stored, duplicates, refused, evicted)


def _existing(path: Path) -> tuple[Path, int]:
    """Data file and budget of the shard in a folder.

    The file is checked by plain reads before anything maps it. Nothing is created or moved: a
    mistyped path must not become a shard, nor a question about a damaged one its end.
    """
    current = ShardFolder(path).current()
    if current is None:
        raise StoreUnavailable(f"{path} holds no shard")
    data_file = current / DATA_FILE
    return data_file, ShardSettings.for_map(check_data_file(data_file).map_bytes).budget_bytes


@contextmanager
def _writer(path: Path, budget_bytes: int, clock: Clock) -> Iterator[ShardWriter]:
    writer = ShardWriter(path, ShardSettings(budget_bytes), clock)
    try:
        yield writer
    finally:
        writer.close()


def _intact(reader: ShardReader, damaged: list[bytes]) -> Iterator[EncodedRecord]:
    keys = reader.keys()
    for start in range(0, len(keys), _BATCH_KEYS):
        batch = keys[start : start + _BATCH_KEYS]
        records = reader.read(batch)
        for key in batch:
            try:
                if key not in records:
                    raise CorruptRecord("the record cannot be read")
                verify_body(parse_head(records[key].head), records[key].body)
            except CorruptRecord:
                damaged.append(key)
            else:
                yield records[key]


def _batches(records: Iterator[EncodedRecord]) -> Iterator[list[EncodedRecord]]:
    batch: list[EncodedRecord] = []
    size_bytes = 0
    for record in records:
        batch.append(record)
        size_bytes += record.nbytes
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
