"""Chunk records as bytes: the format of docs/store-format.md, version 1.

A record is a *head* (everything but KV, with its own checksum) and a *body* of one frame per
layer, each with its own checksum, so that layers can be verified and decoded alone and nothing
damaged is ever decoded. Two codecs are lossless: ``SPLIT`` compresses the byte plane that holds
sign and exponent and stores the mantissa bytes, which are noise, as they are; ``RAW`` stores the
values. ``HALF`` and ``INT8`` are for approximate reuse only (:mod:`rakv_cluster.kv.lossy`). Arrays
are little-endian, like every machine this runs on.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import xxhash
import zstandard

from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.layout import KvDtype, KvLayout
from rakv_cluster.kv.lossy import Quantized, dequantize, fits, quantize, to_bits, to_floats
from rakv_cluster.kv.record import ChunkRecord

FORMAT_VERSION = 1

Buffer: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"RKV1"
# magic, version, codec, dtype, layers, kv_heads, head_dim, numeric class bytes, tokens, start,
# frames, head bytes, body bytes, cost ms, created s, key, namespace
_FIXED = struct.Struct("<4sHBBHHHHIIIIQdd32s32s")
_FRAME = struct.Struct("<IQ")
_CHECKSUM = struct.Struct("<Q")
_PLANE = struct.Struct("<I")
_ID_BYTES = 32
_DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "float16")
# Bit offset and type of the planes of a value, most significant first; the first is compressed.
_PLANES: dict[int, tuple[tuple[int, type[np.unsignedinteger]], ...]] = {
    2: ((8, np.uint8), (0, np.uint8)),
    4: ((24, np.uint8), (16, np.uint8), (0, np.uint16)),
}
_BITS: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32}
_ZSTD_LEVEL = 1  # 3 and 9 are slower and no smaller on exponent planes (research/store.md 2.1)


class Codec(IntEnum):
    """How a frame's values are stored; the number is part of the format."""

    RAW = 0
    SPLIT = 1
    HALF = 2
    INT8 = 3

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the bits that were encoded."""
        return self in (Codec.RAW, Codec.SPLIT)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where one layer's bytes lie in the body, and their xxh3-64."""

    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Everything about a record but its KV."""

    key: bytes
    namespace: bytes
    token_ids: tuple[int, ...]
    start: int
    layout: KvLayout
    codec: Codec
    cost_ms: float
    numeric_class: str
    created_s: float
    body_bytes: int
    frames: tuple[Frame, ...]

    @property
    def lossless(self) -> bool:
        """Whether decoding gives the bits that were put."""
        return self.codec.lossless

    @property
    def kv_bytes(self) -> int:
        """Bytes of the decoded KV."""
        return len(self.token_ids) * self.layout.bytes_per_token


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record as bytes, ready for a shard or another node. ``key`` is also inside ``head``."""

    key: bytes
    head: bytes
    body: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of head and body."""
        return len(self.head) + len(self.body)


class _ThreadCodecs(threading.local):
    """One compressor and one decompressor per thread: zstandard's are not thread-safe."""

    def __init__(self) -> None:
        # The frame checksum covers the decoded bytes, hence the decoder and its memory as well.
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


_codecs = _ThreadCodecs()


def encode(record: ChunkRecord, codec: Codec = Codec.SPLIT) -> EncodedRecord:
    """Encode one chunk; its KV may have any strides.

    Values that a lossy ``codec`` cannot hold, or that it would not make smaller, are encoded with
    ``SPLIT``: the head says which. Raises ``ValueError`` when sizes, shape or dtype do not fit the
    layout.
    """
    layout, kv, tokens = record.layout, record.kv, len(record.token_ids)
    if kv.shape != layout.shape(tokens) or kv.dtype != _BITS[layout.itemsize]:
        raise ValueError(f"kv is {kv.dtype}{list(kv.shape)}, which does not fit {layout}")
    if len(record.key) != _ID_BYTES or len(record.namespace) != _ID_BYTES:
        raise ValueError(f"key and namespace must have {_ID_BYTES} bytes")
    if not codec.lossless and not _holds(codec, record):
        codec = Codec.SPLIT
    parts: list[Buffer] = []
    table: list[bytes] = []
    body_bytes = 0
    for layer in kv:
        pieces = _encode_layer(layer, codec, layout.dtype)
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        length = sum(len(piece) for piece in pieces)
        table.append(_FRAME.pack(length, digest.intdigest()))
        parts.extend(pieces)
        body_bytes += length
    head = _head(record, codec, body_bytes, table)
    return EncodedRecord(record.key, head, b"".join(parts))


def _head(record: ChunkRecord, codec: Codec, body_bytes: int, table: list[bytes]) -> bytes:
    layout = record.layout
    numeric = record.numeric_class.encode()
    ids = np.asarray(record.token_ids, dtype="<u4").tobytes()
    size = _FIXED.size + len(numeric) + len(ids) + _FRAME.size * len(table) + _CHECKSUM.size
    fixed = _FIXED.pack(
        _MAGIC, FORMAT_VERSION, codec, _DTYPES.index(layout.dtype),
        layout.layers, layout.kv_heads, layout.head_dim, len(numeric), len(record.token_ids),
        record.start, len(table), size, body_bytes, record.cost_ms, record.created_s,
        record.key, record.namespace,
    )  # fmt: skip
    head = b"".join((fixed, numeric, ids, *table))
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def parse_head(head: Buffer) -> RecordHead:
    """Verify and read a record's head; raises ``CorruptRecord``.

    An unknown version or codec is ``CorruptRecord`` too: this reader cannot use the bytes.
    """
    size = len(head)
    if size < _FIXED.size + _CHECKSUM.size:
        raise CorruptRecord(f"head of {size} bytes is too short")
    view = memoryview(head)
    (checksum,) = _CHECKSUM.unpack_from(view, size - _CHECKSUM.size)
    (
        magic, version, codec, dtype, layers, kv_heads, head_dim, numeric_bytes, tokens, start,
        frames, head_bytes, body_bytes, cost_ms, created_s, key, namespace,
    ) = _FIXED.unpack_from(view)  # fmt: skip
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise CorruptRecord(f"record of unknown format {magic!r} version {version}")
    if head_bytes != size or xxhash.xxh3_64_intdigest(view[: -_CHECKSUM.size]) != checksum:
        raise CorruptRecord("head does not match its checksum")
    ids_at = _FIXED.size + numeric_bytes
    frames_at = ids_at + 4 * tokens
    if (
        frames_at + _FRAME.size * frames + _CHECKSUM.size != size
        or frames != layers
        or dtype >= len(_DTYPES)
        or codec not in tuple(Codec)
    ):
        raise CorruptRecord("head contradicts itself")
    numeric_class = str(view[_FIXED.size : ids_at], "utf-8", "replace")
    token_ids = tuple(np.frombuffer(view, "<u4", tokens, ids_at).tolist())
    table: list[Frame] = []
    offset = 0
    for length, frame_checksum in _FRAME.iter_unpack(view[frames_at : -_CHECKSUM.size]):
        table.append(Frame(offset, length, frame_checksum))
        offset += length
    if offset != body_bytes:
        raise CorruptRecord("head contradicts itself")
    layout = KvLayout(layers, kv_heads, head_dim, _DTYPES[dtype])
    return RecordHead(
        key, namespace, token_ids, start, layout, Codec(codec), cost_ms, numeric_class, created_s,
        body_bytes, tuple(table),
    )  # fmt: skip


def decode(head: RecordHead, body: Buffer, out: np.ndarray) -> None:
    """Verify and decode a record's first ``out.shape[3]`` tokens into ``out``.

    ``out`` holds raw bits, ``head.layout.shape(n)`` with ``n <= len(head.token_ids)``; a slice of
    a sequence's buffer will do. Raises ``CorruptRecord``; ``out`` is then undefined. Raises
    ``ValueError`` when ``out`` does not fit.
    """
    tokens = out.shape[3]
    layout = head.layout
    if out.shape != layout.shape(tokens) or out.dtype != _BITS[layout.itemsize]:
        raise ValueError(f"out is {out.dtype}{list(out.shape)}, which does not fit {layout}")
    if tokens > len(head.token_ids):
        raise ValueError(f"{tokens} tokens asked of a record of {len(head.token_ids)}")
    for index, piece in enumerate(_verified_frames(head, body)):
        _decode_layer(head, piece, out[index])


def verify_body(head: RecordHead, body: Buffer) -> None:
    """Check every layer against its checksum without decoding; raises ``CorruptRecord``."""
    for _ in _verified_frames(head, body):
        pass


def _verified_frames(head: RecordHead, body: Buffer) -> Iterator[memoryview]:
    if len(body) != head.body_bytes:
        raise CorruptRecord(f"body has {len(body)} bytes, its head says {head.body_bytes}")
    view = memoryview(body)
    for index, frame in enumerate(head.frames):
        piece = view[frame.offset : frame.offset + frame.length]
        if xxhash.xxh3_64_intdigest(piece) != frame.checksum:
            raise CorruptRecord(f"layer {index} does not match its checksum")
        yield piece


def _holds(codec: Codec, record: ChunkRecord) -> bool:
    """Whether a lossy codec can, and is worth it: half precision has no smaller half."""
    if codec is Codec.HALF and record.layout.itemsize == 2:
        return False
    return all(fits(to_floats(layer, record.layout.dtype)) for layer in record.kv)


def _encode_layer(layer: np.ndarray, codec: Codec, dtype: KvDtype) -> list[Buffer]:
    if codec is Codec.RAW:
        return [_bytes_of(layer)]
    if codec is Codec.INT8:
        small = quantize(to_floats(layer, dtype))
        return [_bytes_of(part) for part in (small.key_scales, small.value_scales, small.values)]
    if codec is Codec.HALF:
        layer = to_bits(to_floats(layer, dtype), "float16")
    (top_shift, top_type), *rest = _PLANES[layer.dtype.itemsize]
    top = _codecs.compressor.compress(_bytes_of((layer >> top_shift).astype(top_type)))
    low = [_bytes_of((layer >> shift).astype(kind)) for shift, kind in rest]
    return [_PLANE.pack(len(top)), top, *low]


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _decode_layer(head: RecordHead, piece: memoryview, out: np.ndarray) -> None:
    """One verified frame into ``out``, ``[2, kv_heads, n, head_dim]``."""
    tokens = out.shape[2]
    shape = head.layout.shape(len(head.token_ids))[1:]
    count = int(np.prod(shape))
    if head.codec is Codec.RAW:
        _check_size(piece, count * head.layout.itemsize)
        out[...] = np.frombuffer(piece, out.dtype).reshape(shape)[:, :, :tokens]
    elif head.codec is Codec.INT8:
        small = _read_int8(piece, shape, tokens)
        out[...] = to_bits(dequantize(small), head.layout.dtype)
    elif head.codec is Codec.HALF:
        half = np.empty(out.shape, np.uint16)
        _decode_split(piece, shape, half)
        out[...] = to_bits(to_floats(half, "float16"), head.layout.dtype)
    else:
        _decode_split(piece, shape, out)


def _read_int8(piece: memoryview, shape: tuple[int, ...], tokens: int) -> Quantized:
    """The first ``tokens`` of a quantized layer of ``shape``."""
    _, heads, stored, size = shape
    scales = heads * (size + stored)
    _check_size(piece, 4 * scales + int(np.prod(shape)))
    table = np.frombuffer(piece, np.float32, scales)
    values = np.frombuffer(piece, np.int8, offset=4 * scales).reshape(shape)
    return Quantized(
        values[:, :, :tokens],
        table[: heads * size].reshape(heads, 1, size),
        table[heads * size :].reshape(heads, stored, 1)[:, :tokens],
    )


def _decode_split(piece: memoryview, shape: tuple[int, ...], out: np.ndarray) -> None:
    """A frame of byte planes into ``out``, unsigned, the leading tokens of ``shape``."""
    tokens = out.shape[2]
    count = int(np.prod(shape))
    (top_shift, top_type), *rest = _PLANES[out.dtype.itemsize]
    _check_size(piece, _PLANE.size, at_least=True)
    (top_bytes,) = _PLANE.unpack_from(piece)
    offset = _PLANE.size + top_bytes
    _check_size(piece, offset + sum(count * np.dtype(kind).itemsize for _, kind in rest))
    try:
        plane = _codecs.decompressor.decompress(piece[_PLANE.size : offset], max_output_size=count)
    except zstandard.ZstdError as error:
        raise CorruptRecord(f"damaged zstd frame: {error}") from error
    _check_size(plane, count)
    top = np.frombuffer(plane, top_type).reshape(shape)[:, :, :tokens]
    np.left_shift(top, top_shift, out=out, dtype=out.dtype)
    for shift, kind in rest:
        low = np.frombuffer(piece, kind, count, offset).reshape(shape)[:, :, :tokens]
        offset += low.dtype.itemsize * count
        np.bitwise_or(out, np.left_shift(low, shift, dtype=out.dtype) if shift else low, out=out)


def _check_size(data: Buffer, expected: int, *, at_least: bool = False) -> None:
    if len(data) != expected and not (at_least and len(data) > expected):
        raise CorruptRecord(f"frame part has {len(data)} bytes, expected {expected}")
