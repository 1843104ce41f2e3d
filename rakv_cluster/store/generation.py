"""One open LMDB environment and how records lie in it (docs/store-format.md, section 3)."""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np

from rakv_cluster.chunking.keys import KEY_BYTES
from rakv_cluster.errors import CorruptRecord, StoreUnavailable
from rakv_cluster.kv.codec import EncodedRecord, RecordHead, parse_head
from rakv_cluster.store.base import Found
from rakv_cluster.store.donors import Donor, donated_content
from rakv_cluster.store.eviction import Entry
from rakv_cluster.store.folder import DATA_FILE, check_data_file
from rakv_cluster.types import Tier

_log = logging.getLogger(__name__)

PAGE_BYTES: Final = 4096
SEGMENT_BYTES: Final = 15 * PAGE_BYTES - 16
"""A full segment fills 15 pages with their one page header. Equal runs keep LMDB's list of free
pages usable: with whole records of mixed size the map is full at 80% (research/store.md 3.4)."""

_ENTRY = struct.Struct("<QQIIdddI32s")
_RECORD_ID = struct.Struct(">Q")
_SEGMENT_KEY = struct.Struct(">QI")
_DONOR = struct.Struct(f"<Q{KEY_BYTES}s")
_MOST_DONORS_READ = 16
_DATABASES = (b"heads", b"bodies", b"index", b"pins", b"state", b"contents")
_SCHEMA_KEY = b"schema"
_SCHEMA = b"1"
_PIN = struct.Struct("<d")
_TICK_KEY = b"tick"
_MAX_READERS = 1024
_BALLAST_FILE = "ballast"
_BALLAST_BYTES = 1 << 20
_DAMAGED_TABLES = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.NotFoundError, lmdb.IncompatibleError,
)  # fmt: skip


def charged_bytes(head_bytes: int, body_bytes: int) -> int:
    """Bytes a record takes of the file: its body's whole pages, and one for head and index."""
    full, rest = divmod(body_bytes, SEGMENT_BYTES)
    pages = full * 15 + (-(-(rest + 16) // PAGE_BYTES) if rest else 0)
    return (pages + 1 + head_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A record's head and the number under which its body's segments are filed."""

    record_id: int
    head: RecordHead
    size_bytes: int

    def found(self) -> Found:
        """The head as a store's answer."""
        head = self.head
        return Found(
            head.token_ids, Tier.DISK, self.size_bytes, head.cost_ms, head.numeric_class,
            head.namespace, head.start, head.created_s, head.lossless,
        )  # fmt: skip


class Generation:
    """An open environment. Reads may come from any thread, writes from one.

    ``lease`` keeps the environment open while it is read; ``retire`` closes it once nobody does.
    """

    def __init__(self, path: Path, env: Any, *, readonly: bool) -> None:
        self.path = path
        self.env = env
        self._lock = threading.Lock()
        self._leases = 0
        self._retired = False
        try:
            self._fd = os.open(path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            env.close()
            raise StoreUnavailable(f"cannot open {path}: {error}") from error
        try:
            self._open_databases(readonly)
        except BaseException:
            self.retire()
            raise

    @classmethod
    def create(cls, path: Path, map_bytes: int) -> Generation:
        """Start an empty environment in an empty folder; raises ``StoreUnavailable``."""
        return cls(path, _environment(path, map_bytes, readonly=False), readonly=False)

    @classmethod
    def open_writable(cls, path: Path) -> Generation:
        """Open an environment as its one writer.

        Its map keeps the size it was created with, so that no reader ever has to map it anew.
        Raises ``CorruptRecord`` or ``StoreUnavailable``.
        """
        checked = check_data_file(path / DATA_FILE)
        return cls(path, _environment(path, checked.map_bytes, readonly=False), readonly=False)

    @classmethod
    def open_readonly(cls, path: Path) -> Generation:
        """Open an environment that another process writes; raises as ``open_writable``."""
        checked = check_data_file(path / DATA_FILE)
        return cls(path, _environment(path, checked.map_bytes, readonly=True), readonly=True)

    @property
    def map_bytes(self) -> int:
        """Size of the memory map."""
        return int(self.env.info()["map_size"])

    def _open_databases(self, readonly: bool) -> None:
        try:
            databases = [self.env.open_db(name, create=not readonly) for name in _DATABASES]
            self.heads, self.bodies, self.index, self.pins, self.state = databases[:5]
            self.contents = databases[5]
            with self.env.begin(write=not readonly) as txn:
                schema = txn.get(_SCHEMA_KEY, db=self.state)
                if schema is None and not readonly:
                    txn.put(_SCHEMA_KEY, _SCHEMA, db=self.state)
                elif schema != _SCHEMA:
                    raise StoreUnavailable(f"{self.path} has unknown schema {schema!r}")
        except _DAMAGED_TABLES as error:
            raise CorruptRecord(f"{self.path} is damaged: {error}") from error
        except lmdb.Error as error:
            raise StoreUnavailable(f"cannot open {self.path}: {error}") from error

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Keep the environment open; raises ``StoreUnavailable`` if it is retired or was cut."""
        with self._lock:
            if self._retired:
                raise StoreUnavailable(f"{self.path} is being replaced")
            self._leases += 1
        try:
            if not self.is_whole():
                raise StoreUnavailable(f"{self.path} was truncated")
            yield
        finally:
            with self._lock:
                self._leases -= 1
                self._close_if_unused()

    def cover_used_pages(self) -> None:
        """Make the file as long as its meta page says.

        LMDB does not write a new page that the same transaction freed again, so after a commit
        the file may end a few pages short; the check before mapping could not tell that from a
        truncated file.
        """
        used_bytes = self._used_bytes()
        try:
            if os.fstat(self._fd).st_size < used_bytes:
                os.truncate(self.path / DATA_FILE, used_bytes)
        except OSError as error:
            # What was committed stays valid; at worst it is moved aside at the next start.
            _log.warning("cannot extend %s: %s", self.path, error)

    def set_ballast(self) -> None:
        """Keep a little of the disk in reserve, if there is any left.

        Even a deletion writes new pages, so on a full disk nothing could ever be evicted.
        """
        try:
            fd = os.open(self.path / _BALLAST_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, _BALLAST_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            _log.info("no reserve on the disk of %s: %s", self.path, error)

    def drop_ballast(self) -> None:
        """Give the reserve back to the disk."""
        (self.path / _BALLAST_FILE).unlink(missing_ok=True)

    def is_whole(self) -> bool:
        """Whether the file has all its pages: reading behind a cut would be a SIGBUS.

        Asked before each use, this leaves only a cut *during* a read to kill the process
        (docs/adr/0021).
        """
        file_bytes = os.fstat(self._fd).st_size
        return file_bytes >= 2 * PAGE_BYTES and file_bytes >= self._used_bytes()

    def retire(self) -> None:
        """Close the environment now, or when the last lease ends. Idempotent."""
        with self._lock:
            if not self._retired:
                self._retired = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._leases == 0:
            self.env.close()
            os.close(self._fd)

    def _used_bytes(self) -> int:
        return int(self.env.info()["last_pgno"] + 1) * PAGE_BYTES


def _environment(path: Path, map_bytes: int, *, readonly: bool) -> Any:
    try:
        return lmdb.open(
            str(path), map_size=map_bytes, max_dbs=len(_DATABASES), readonly=readonly,
            create=not readonly, sync=False, writemap=False, meminit=False,
            # A cold record is read in a row: 500 MB/s with readahead, 60 without.
            readahead=True,
            max_readers=_MAX_READERS, max_spare_txns=8, lib_version=0,
        )  # fmt: skip
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise CorruptRecord(f"{path} is damaged: {error}") from error
    except (lmdb.Error, OSError) as error:
        raise StoreUnavailable(f"cannot open {path}: {error}") from error


def get_head(generation: Generation, txn: Any, key: bytes) -> StoredHead | None:
    """A record's verified head; None if there is none; raises ``CorruptRecord``."""
    value = txn.get(key, db=generation.heads)
    if value is None:
        return None
    head = parse_head(memoryview(value)[_RECORD_ID.size :])
    if head.key != key:
        raise CorruptRecord("record lies under another key")
    (record_id,) = _RECORD_ID.unpack_from(value)
    size = charged_bytes(len(value) - _RECORD_ID.size, head.body_bytes)
    return StoredHead(record_id, head, size)


def get_encoded(generation: Generation, txn: Any, key: bytes) -> EncodedRecord | None:
    """A record as it was written; None if there is none; raises ``CorruptRecord``."""
    stored = get_head(generation, txn, key)
    if stored is None:
        return None
    body = np.empty(stored.head.body_bytes, np.uint8)
    read_body(generation, txn, stored, body)
    head = bytes(txn.get(key, db=generation.heads)[_RECORD_ID.size :])
    return EncodedRecord(key, head, body.tobytes())


def read_body(generation: Generation, txn: Any, stored: StoredHead, out: np.ndarray) -> None:
    """Join a record's segments into ``out``, uint8 ``[head.body_bytes]``.

    ``txn`` must have been begun with ``buffers=True``. Raises ``CorruptRecord`` if any is missing
    or of another size.
    """
    offset = 0
    with txn.cursor(db=generation.bodies) as cursor:
        found = cursor.set_key(_SEGMENT_KEY.pack(stored.record_id, 0)) if len(out) else False
        while found and offset < len(out):
            segment = np.frombuffer(cursor.value(), np.uint8)
            expected = min(SEGMENT_BYTES, len(out) - offset)
            if len(segment) != expected:
                break
            # np.copyto releases the interpreter lock, also while pages come from the disk.
            np.copyto(out[offset : offset + expected], segment)
            offset += expected
            found = cursor.next()
    if offset != len(out):
        raise CorruptRecord(f"body ends after {offset} of {len(out)} bytes")


def put_record(
    generation: Generation, txn: Any, record_id: int, record: EncodedRecord, entry: Entry
) -> None:
    """Write a record that is not there yet."""
    txn.put(record.key, _RECORD_ID.pack(record_id) + record.head, db=generation.heads)
    put_entry(generation, txn, record.key, record_id, entry)
    content = donated_content(parse_head(record.head))
    if content:
        donor = _DONOR.pack(entry.start, record.key)
        txn.put(content + _RECORD_ID.pack(record_id), donor, db=generation.contents)
    body = memoryview(record.body)
    for number, start in enumerate(range(0, len(body), SEGMENT_BYTES)):
        txn.put(
            _SEGMENT_KEY.pack(record_id, number),
            body[start : start + SEGMENT_BYTES],
            db=generation.bodies,
            append=True,  # record ids only grow
        )


def put_pin(generation: Generation, txn: Any, key: bytes, owner: str, until_s: float) -> None:
    """Write or move the end of an owner's pin."""
    txn.put(key + owner.encode(), _PIN.pack(until_s), db=generation.pins)


def delete_pin(generation: Generation, txn: Any, key: bytes, owner: str) -> None:
    """Remove an owner's pin if there is one."""
    txn.delete(key + owner.encode(), db=generation.pins)


def read_pins(generation: Generation, txn: Any) -> Iterator[tuple[bytes, str, float]]:
    """``(key, owner, end)`` of every pin."""
    with txn.cursor(db=generation.pins) as cursor:
        for key_and_owner, value in cursor:
            name = bytes(key_and_owner)
            if len(value) == _PIN.size:
                yield (
                    name[:KEY_BYTES],
                    name[KEY_BYTES:].decode(errors="replace"),
                    *_PIN.unpack(value),
                )


def put_entry(generation: Generation, txn: Any, key: bytes, record_id: int, entry: Entry) -> None:
    """Write or replace a record's metadata."""
    value = _ENTRY.pack(
        record_id, entry.size_bytes, entry.tokens, entry.start, entry.cost_ms, entry.created_s,
        entry.last_use_s, entry.uses, entry.namespace,
    )  # fmt: skip
    txn.put(key, value, db=generation.index)


def delete_record(generation: Generation, txn: Any, key: bytes, record_id: int) -> None:
    """Remove a record and all its segments."""
    _delete_donor(generation, txn, key, record_id)
    txn.delete(key, db=generation.heads)
    txn.delete(key, db=generation.index)
    prefix = _RECORD_ID.pack(record_id)
    with txn.cursor(db=generation.bodies) as cursor:
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key())[: _RECORD_ID.size] == prefix:
            found = cursor.delete()


def read_donors(generation: Generation, txn: Any, content: bytes) -> list[Donor]:
    """Records that can serve a content key, the oldest first; a bounded number of them."""
    donors: list[Donor] = []
    with txn.cursor(db=generation.contents) as cursor:
        found = cursor.set_range(content)
        while found and bytes(cursor.key())[:KEY_BYTES] == content:
            if len(cursor.value()) == _DONOR.size:
                start, key = _DONOR.unpack(cursor.value())
                donors.append(Donor(key, start))
            if len(donors) == _MOST_DONORS_READ:
                break
            found = cursor.next()
    return donors


def _delete_donor(generation: Generation, txn: Any, key: bytes, record_id: int) -> None:
    """Forget a record as a donor. One whose head is damaged stays listed: it is found missing."""
    value = txn.get(key, db=generation.heads)
    if value is None:
        return
    try:
        content = donated_content(parse_head(memoryview(value)[_RECORD_ID.size :]))
    except CorruptRecord:
        return
    if content:
        txn.delete(content + _RECORD_ID.pack(record_id), db=generation.contents)


def tick(generation: Generation, txn: Any) -> None:
    """Change something, so that the transaction counts as one."""
    count = int.from_bytes(txn.get(_TICK_KEY, default=b"", db=generation.state), "little")
    txn.put(_TICK_KEY, (count + 1).to_bytes(8, "little"), db=generation.state)


def read_index(generation: Generation, txn: Any) -> Iterator[tuple[bytes, int, Entry]]:
    """``(key, record id, entry)`` of every record; raises ``CorruptRecord``."""
    contents = _read_contents(generation, txn)
    with txn.cursor(db=generation.index) as cursor:
        for key, value in cursor:
            if len(value) != _ENTRY.size:
                raise CorruptRecord(f"index entry of {len(value)} bytes")
            (
                record_id, size_bytes, tokens, start, cost_ms, created_s, last_use_s, uses, ns,
            ) = _ENTRY.unpack(value)  # fmt: skip
            content = contents.get(bytes(key), b"")
            entry = Entry(
                ns, size_bytes, tokens, start, cost_ms, created_s, last_use_s, uses, content
            )
            yield bytes(key), record_id, entry


def _read_contents(generation: Generation, txn: Any) -> dict[bytes, bytes]:
    """The content key of every record that can serve one."""
    contents: dict[bytes, bytes] = {}
    with txn.cursor(db=generation.contents) as cursor:
        for content_and_id, value in cursor:
            if len(value) == _DONOR.size:
                contents[_DONOR.unpack(value)[1]] = bytes(content_and_id[:KEY_BYTES])
    return contents
