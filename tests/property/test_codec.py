"""The codec returns the bits that went in, or an error: never other bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.codec import Codec, decode, encode, parse_head, verify_body
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.record import ChunkRecord

DTYPES = ("float32", "bfloat16", "float16")
codecs = st.sampled_from([codec for codec in Codec if codec.lossless])


@st.composite
def records(draw, max_tokens=9):
    layout = KvLayout(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    tokens = draw(st.integers(1, max_tokens))
    kind = np.uint32 if layout.itemsize == 4 else np.uint16
    return ChunkRecord(
        key=draw(st.binary(min_size=32, max_size=32)),
        namespace=draw(st.binary(min_size=32, max_size=32)),
        token_ids=tuple(
            draw(st.lists(st.integers(0, 2**32 - 1), min_size=tokens, max_size=tokens))
        ),
        start=draw(st.integers(0, 2**32 - 1)),
        layout=layout,
        kv=draw(npst.arrays(kind, layout.shape(tokens))),
        cost_ms=draw(st.floats(0, 1e6)),
        numeric_class=draw(st.text(max_size=12)),
        created_s=draw(st.floats(0, 1e12)),
    )


def in_a_buffer(record, tokens):
    """An ``out`` that is a slice of a longer sequence buffer, full of other values."""
    buffer = np.full(record.layout.shape(tokens + 7), 0xABCD, record.kv.dtype)
    return buffer, buffer[:, :, :, 3 : 3 + tokens]


@given(records(), codecs)
def test_decoding_gives_the_bits_back(record, codec):
    encoded = encode(record, codec)
    head = parse_head(encoded.head)
    buffer, out = in_a_buffer(record, len(record.token_ids))

    decode(head, encoded.body, out)

    np.testing.assert_array_equal(out, record.kv)
    assert (buffer[:, :, :, :3] == 0xABCD).all()
    assert (buffer[:, :, :, -4:] == 0xABCD).all()
    assert replace(record, kv=head.layout) == ChunkRecord(
        head.key, head.namespace, head.token_ids, head.start, head.layout, head.layout,
        head.cost_ms, head.numeric_class, head.created_s,
    )  # fmt: skip


@given(records(), codecs, st.data())
def test_the_first_tokens_can_be_decoded_alone(record, codec, data):
    tokens = data.draw(st.integers(1, len(record.token_ids)))
    encoded = encode(record, codec)
    _, out = in_a_buffer(record, tokens)

    decode(parse_head(encoded.head), encoded.body, out)

    np.testing.assert_array_equal(out, record.kv[:, :, :, :tokens])


@given(records(), codecs)
def test_kv_of_any_strides_is_encoded_alike(record, codec):
    _, view = in_a_buffer(record, len(record.token_ids))
    view[...] = record.kv

    assert encode(replace(record, kv=view), codec) == encode(record, codec)


@given(records(max_tokens=4), codecs, st.data())
def test_any_flipped_bit_is_noticed(record, codec, data):
    encoded = encode(record, codec)
    part = data.draw(st.sampled_from(["head", "body"]))
    damaged = bytearray(getattr(encoded, part))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    changed = replace(encoded, **{part: bytes(damaged)})
    _, out = in_a_buffer(record, len(record.token_ids))

    with pytest.raises(CorruptRecord):
        decode(parse_head(changed.head), changed.body, out)
    with pytest.raises(CorruptRecord):
        verify_body(parse_head(changed.head), changed.body)


@given(records(max_tokens=4), codecs, st.data())
def test_any_truncation_is_noticed(record, codec, data):
    encoded = encode(record, codec)
    part = data.draw(st.sampled_from(["head", "body"]))
    whole = getattr(encoded, part)
    changed = replace(encoded, **{part: whole[: data.draw(st.integers(0, len(whole) - 1))]})

    with pytest.raises(CorruptRecord):
        verify_body(parse_head(changed.head), changed.body)


@given(st.binary(max_size=400))
def test_garbage_is_no_head(garbage):
    with pytest.raises(CorruptRecord):
        parse_head(garbage)


def small_record(dtype="bfloat16", tokens=5):
    layout = KvLayout(2, 2, 4, dtype)
    kind = np.uint32 if layout.itemsize == 4 else np.uint16
    kv = np.random.default_rng(7).integers(0, 2**15, layout.shape(tokens)).astype(kind)
    return ChunkRecord(bytes(32), bytes(32), tuple(range(tokens)), 0, layout, kv, 1.0, "cpu", 0.0)


def test_an_unknown_version_is_refused():
    head = bytearray(encode(small_record()).head)
    head[4] += 1

    with pytest.raises(CorruptRecord, match="version 2"):
        parse_head(bytes(head))


def test_shapes_that_do_not_fit_are_refused():
    record = small_record()
    encoded = encode(record)
    head = parse_head(encoded.head)

    with pytest.raises(ValueError, match="does not fit"):
        encode(replace(record, token_ids=(1, 2)))
    with pytest.raises(ValueError, match="32 bytes"):
        encode(replace(record, key=b"short"))
    with pytest.raises(ValueError, match="does not fit"):
        decode(head, encoded.body, np.zeros(record.layout.shape(5), np.uint32))
    with pytest.raises(ValueError, match="6 tokens asked of a record of 5"):
        decode(head, encoded.body, np.zeros(record.layout.shape(6), np.uint16))


def test_split_makes_activations_smaller():
    layout = KvLayout(2, 2, 64, "bfloat16")
    values = np.random.default_rng(7).standard_normal(layout.shape(64)).astype(np.float32)
    kv = (values.view(np.uint32) >> 16).astype(np.uint16)
    record = replace(small_record(), layout=layout, kv=kv, token_ids=tuple(range(64)))

    assert len(encode(record).body) < 0.72 * len(encode(record, Codec.RAW).body)


def test_threads_share_nothing():
    made = [small_record(dtype, tokens) for dtype in DTYPES for tokens in range(1, 30)]

    def round_trip(record):
        encoded = encode(record)
        out = np.empty_like(record.kv)
        decode(parse_head(encoded.head), encoded.body, out)
        return bool((out == record.kv).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, made * 4))
