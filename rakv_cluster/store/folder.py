"""A shard's folder on disk: identity, writer lock, generations, quarantine.

    shard.json         identity (a UUID) and format version
    writer.lock        flock held by the one writer, whose pid it names
    OPEN               machine boot of the writer that did not close the shard yet
    CURRENT            name of the live generation, replaced atomically
    gen-000007/        an LMDB environment (data.mdb, lock.mdb)
    quarantine/        the last environment that was found damaged

A generation's files are never changed by anything but LMDB. Whatever needs another file (a fresh
start, compaction, import) builds the next generation and then moves CURRENT. On Linux an unlinked
file stays readable where it is mapped, so old generations are unlinked at once; readers follow
CURRENT at their next batch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rakv_cluster.errors import CorruptRecord, StoreUnavailable, WriterFenced

FOLDER_FORMAT = 1
DATA_FILE = "data.mdb"
_PID_BYTES = 32

_CURRENT = "CURRENT"
_OPEN = "OPEN"
_PREFIX = "gen-"
_IDENTITY = "shard.json"
_QUARANTINE = "quarantine"

# LMDB 0.9's meta page on 64-bit machines: a page header, then MDB_meta (lmdb.h, mdb.c).
_PAGE_HEADER_BYTES = 16
_META = struct.Struct("<IIQQ48s48sQQ")
_META_MAGIC = 0xBEEFC0DE
_META_VERSION = 1
_META_PAGES = 2
_LARGEST_MAP_BYTES = 1 << 46  # an address space has 2**47
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What the newest intact meta page of a data file says."""

    page_bytes: int
    used_bytes: int
    map_bytes: int


class ShardFolder:
    """Paths and atomic moves inside one shard's folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def create(self) -> str:
        """Make the folder if needed and return the shard's id; raises ``StoreUnavailable``.

        An identity that is missing or damaged is made anew: no record depends on it.
        """
        identity = self.path / _IDENTITY
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            known = _read_identity(identity)
            if known is None:
                known = (uuid.uuid4().hex, FOLDER_FORMAT)
                fresh = dict(zip(("shard_id", "format"), known, strict=True))
                _write_atomically(identity, json.dumps(fresh))
        except OSError as error:
            raise StoreUnavailable(f"shard folder {self.path} is unusable: {error}") from error
        shard_id, version = known
        if version != FOLDER_FORMAT:
            raise StoreUnavailable(f"shard folder {self.path} has unknown format {version}")
        return shard_id

    def lock(self) -> WriterLock:
        """Become the folder's writer; raises ``WriterFenced`` while another one lives."""
        return WriterLock(self.path / "writer.lock")

    def other_writer(self) -> str:
        """Who writes to the folder now, in words; empty if nobody does."""
        try:
            self.lock().release()
        except WriterFenced as error:
            return error.message
        return ""

    def mark_open(self) -> None:
        """Note that a writer of this boot has the shard open; raises ``StoreUnavailable``."""
        try:
            _write_atomically(self.path / _OPEN, _boot_id())
        except OSError as error:
            raise StoreUnavailable(f"cannot write to {self.path}: {error}") from error

    def mark_closed(self) -> None:
        """Note that everything is written and synced.

        If even that fails, the next writer on another boot verifies the shard for nothing.
        """
        with suppress(OSError):
            (self.path / _OPEN).unlink(missing_ok=True)

    def outlived_its_machine(self) -> bool:
        """Whether the machine went down under a writer: unsynced pages may be lost in any order.

        A writer that was merely killed loses nothing, the kernel keeps its pages.
        """
        try:
            return (self.path / _OPEN).read_bytes() != _boot_id().encode()
        except OSError:
            return False

    def current(self) -> Path | None:
        """The live generation's folder; None before the first one."""
        try:
            name = (self.path / _CURRENT).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self.path / name if _is_generation(name) else None

    def next_generation(self) -> Path:
        """Make an empty folder for the generation after every existing one."""
        numbers = [int(name[len(_PREFIX) :]) for name in self._generations()]
        generation = self.path / f"{_PREFIX}{max(numbers, default=0) + 1:06d}"
        generation.mkdir()
        return generation

    def publish(self, generation: Path) -> None:
        """Make a generation the live one and unlink all others."""
        _write_atomically(self.path / _CURRENT, generation.name + "\n")
        self.remove_stale(generation)

    def discard(self, generation: Path) -> None:
        """Unlink a generation that never became the live one."""
        shutil.rmtree(generation, ignore_errors=True)

    def remove_stale(self, generation: Path) -> None:
        """Unlink every generation but this one (a crash may have left some)."""
        for name in self._generations():
            if name != generation.name:
                shutil.rmtree(self.path / name, ignore_errors=True)

    def quarantine(self, generation: Path) -> Path:
        """Move a damaged generation aside, in place of the one that was there before."""
        aside = self.path / _QUARANTINE
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        target = aside / generation.name
        generation.rename(target)
        return target

    def _generations(self) -> list[str]:
        return [name for name in os.listdir(self.path) if _is_generation(name)]


class WriterLock:
    """An exclusive flock. The kernel drops it when the process dies, however it dies."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnavailable(f"cannot open {path}: {error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, _PID_BYTES, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise WriterFenced(
                f"another process writes to {path.parent}: pid {holder or 'unknown'}"
            ) from error
        # On a full disk the name is missing, which only a message lacks.
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another writer in."""
        os.close(self._fd)


def check_data_file(path: Path) -> FileCheck:
    """Verify by plain reads that a data file is safe to map; raises ``CorruptRecord``.

    Mapping a file that is shorter than its meta page says kills the process by SIGBUS at the first
    read behind the end, and LMDB 0.9 does not look.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            metas = _read_metas(file.read(_PAGE_SIZES[0]), file.fileno())
    except OSError as error:
        raise CorruptRecord(f"{path} cannot be read: {error}") from error
    if not metas:
        raise CorruptRecord(f"{path} has no intact meta page")
    _, newest = max(metas, key=lambda meta: meta[0])
    if not newest.used_bytes <= newest.map_bytes <= _LARGEST_MAP_BYTES:
        raise CorruptRecord(f"{path} claims a map of {newest.map_bytes} bytes")
    if newest.used_bytes > file_bytes:
        raise CorruptRecord(f"{path} has {file_bytes} of {newest.used_bytes} bytes")
    return newest


def _read_metas(first: bytes, fd: int) -> list[tuple[int, FileCheck]]:
    """``(transaction id, check)`` of each intact meta page."""
    metas = [meta for meta in [_parse_meta(first)] if meta is not None]
    sizes = [metas[0][1].page_bytes] if metas else _PAGE_SIZES
    for page_bytes in sizes:
        second = _parse_meta(os.pread(fd, _PAGE_SIZES[0], page_bytes))
        if second is not None and second[1].page_bytes == page_bytes:
            metas.append(second)
    return metas


def _parse_meta(page: bytes) -> tuple[int, FileCheck] | None:
    if len(page) < _PAGE_HEADER_BYTES + _META.size:
        return None
    magic, version, _, map_bytes, free_db, _, last_page, txn_id = _META.unpack_from(
        page, _PAGE_HEADER_BYTES
    )
    page_bytes = int.from_bytes(free_db[:4], "little")
    if magic != _META_MAGIC or version != _META_VERSION or page_bytes not in _PAGE_SIZES:
        return None
    used_bytes = max(last_page + 1, _META_PAGES) * page_bytes
    return txn_id, FileCheck(page_bytes, used_bytes, map_bytes)


def _read_identity(path: Path) -> tuple[str, int] | None:
    """``(shard id, format)``; None for a file that is missing or says neither."""
    try:
        found = json.loads(path.read_text())
        return str(found["shard_id"]), int(found["format"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _is_generation(name: str) -> bool:
    return name.startswith(_PREFIX) and name[len(_PREFIX) :].isdigit()
