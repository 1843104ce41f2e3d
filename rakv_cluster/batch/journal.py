"""Finished rows on disk as they finish: what a killed job need not do again.

A file of lines ``CRC-32 in hex, space, JSON``. The first names the job, each other holds one row's
result and is on the disk (fsync) before the row counts as done. A kill can only leave an incomplete
last line, which is cut off when the journal is opened again. A line damaged otherwise counts as not
there. Where a row has several lines, the last one stands.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rakv_cluster.errors import ConfigError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of one row. ``error_code`` is empty if it was answered; ``*_s`` and
    ``cached_tokens`` depend on the moment, all else on the job alone."""

    index: int
    text: str = ""
    finish_reason: str = ""
    error_code: str = ""
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the service refused the row or failed on it."""
        return bool(self.error_code)


class Journal:
    """One job's journal, held by this process alone while it is open.

    Memory: one number per finished row; results are read back from the file.
    """

    def __init__(self, path: Path, job: str) -> None:
        """Open or create. Raises :class:`ConfigError` if another process has it open, or if it
        belongs to another job (``job`` is a digest of everything that the results depend on)."""
        self._path = path
        created = not path.exists()
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            self._lock()
            self._offsets: dict[int, int] = {}
            self._failed: set[int] = set()
            self._end = self._read(job)
            if self._end == 0:
                self._file.truncate(0)
                self._append({"job": job, "version": _VERSION})
            else:
                self._file.truncate(self._end)
            if created:
                sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, index: object) -> bool:
        return index in self._offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def failed(self) -> frozenset[int]:
        """Rows whose last result is an error."""
        return frozenset(self._failed)

    def add(self, result: RowResult) -> None:
        """Append a result; on return it is on the disk."""
        offset = self._append(asdict(result))
        self._note(result, offset)

    def result(self, index: int) -> RowResult:
        """The result of a row; raises ``KeyError`` for one that has none."""
        self._file.seek(self._offsets[index])
        return RowResult(**_parse(self._file.readline()))

    def results(self, count: int) -> Iterator[RowResult]:
        """Results of rows 0 to ``count`` - 1 in order; ``KeyError`` where one is missing."""
        return (self.result(index) for index in range(count))

    def close(self) -> None:
        """Close and unlock."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process works on {self._path}") from error

    def _read(self, job: str) -> int:
        """Note all results; the offset behind the last whole line, 0 if there is no header."""
        header = self._file.readline()
        found = _parse(header)
        if not found:
            return 0
        if found.get("version") != _VERSION or found.get("job") != job:
            raise ConfigError(
                f"{self._path} belongs to another job (other prompts, documents or options): "
                "resume with those, or delete it to start over"
            )
        end = len(header)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if content := _parse(line):
                self._note(RowResult(**content), end)
            end += len(line)
        return end

    def _note(self, result: RowResult, offset: int) -> None:
        self._offsets[result.index] = offset
        if result.failed:
            self._failed.add(result.index)
        else:
            self._failed.discard(result.index)

    def _append(self, content: dict[str, Any]) -> int:
        offset = self._end
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        self._file.seek(offset)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._end = offset + len(line)
        return offset


def sync_folder(folder: Path) -> None:
    """Make a folder's entries (a created or renamed file) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(line: bytes) -> dict[str, Any]:
    """A line's content; empty for a line that is not whole."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return {}
    content: dict[str, Any] = json.loads(text)
    return content
