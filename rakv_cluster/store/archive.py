"""Records as one file, to move a shard's content elsewhere (docs/store-format.md, section 4).

"RKVA" u16 version, then per record u32 head bytes, u64 body bytes, head, body;
at the end a zero head length and the number of records as u64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.codec import EncodedRecord, parse_head, verify_body

_MAGIC = b"RKVA"
_VERSION = 1
_START = struct.Struct("<4sH")
_SIZES = struct.Struct("<IQ")
_LARGEST_HEAD_BYTES = 1 << 24
_LARGEST_BODY_BYTES = 1 << 40


def write_archive(records: Iterable[EncodedRecord], file: BinaryIO) -> int:
    """Write records to a binary file; returns how many."""
    file.write(_START.pack(_MAGIC, _VERSION))
    count = 0
    for record in records:
        file.write(_SIZES.pack(len(record.head), len(record.body)))
        file.write(record.head)
        file.write(record.body)
        count += 1
    file.write(_SIZES.pack(0, count))
    return count


def read_archive(file: BinaryIO) -> Iterator[EncodedRecord]:
    """Verified records of an archive.

    Raises ``CorruptRecord`` for a file that is no archive of this version or ends early, and at the
    first damaged record: its lengths cannot be trusted, so nothing behind it can be found.
    """
    magic, version = _START.unpack(_exactly(file, _START.size))
    if magic != _MAGIC or version != _VERSION:
        raise CorruptRecord(f"no archive of version {_VERSION}: {magic!r} version {version}")
    count = 0
    while True:
        head_bytes, body_bytes = _SIZES.unpack(_exactly(file, _SIZES.size))
        if head_bytes == 0:
            break
        if head_bytes > _LARGEST_HEAD_BYTES or body_bytes > _LARGEST_BODY_BYTES:
            raise CorruptRecord(f"record {count} claims {head_bytes} + {body_bytes} bytes")
        head = _exactly(file, head_bytes)
        parsed = parse_head(head)
        if parsed.body_bytes != body_bytes:
            raise CorruptRecord(f"record {count} contradicts its head")
        body = _exactly(file, body_bytes)
        verify_body(parsed, body)
        count += 1
        yield EncodedRecord(parsed.key, head, body)
    if body_bytes != count:
        raise CorruptRecord(f"archive has {count} of {body_bytes} records")


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise CorruptRecord("archive ends early")
    return data
