"""Lossy records: how far values move, and that no exact load ever gets them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.cluster.store_client import NodeStore
from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.codec import Codec, decode, encode, parse_head
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.lossy import LARGEST, fits, to_bits, to_floats
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.reuse.planner import usable
from rakv_cluster.store.base import ChunkStore, LoadItem, serves
from rakv_cluster.store.lmdb_shard import LmdbStore, ShardSettings, ShardWriter
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import TINY_NAMESPACE, tiny_record
from rakv_cluster.testing.simulated_shards import SimulatedShards

LOSSY = [Codec.HALF, Codec.INT8]
DTYPES = ["float32", "bfloat16", "float16"]
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def record_of(values: np.ndarray, dtype: str = "float32") -> ChunkRecord:
    """A record of ``values``, float32 ``[layers, 2, kv_heads, n, head_dim]``."""
    layers, _, heads, tokens, size = values.shape
    layout = KvLayout(layers, heads, size, dtype)
    kv = to_bits(np.ascontiguousarray(values), dtype)
    base = tiny_record(1, tokens)
    return ChunkRecord(
        base.key, TINY_NAMESPACE, base.token_ids, 10, layout, kv, 1.0, "test", 0.0
    )  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> ChunkRecord:
    shape = tuple(draw(st.integers(1, 3)) for _ in range(3))
    tokens = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    scale = 10.0 ** draw(st.integers(-6, 3))
    values = rng.standard_normal((shape[0], 2, shape[1], tokens, 2 * shape[2])) * scale
    return record_of(values.astype(np.float32), draw(st.sampled_from(DTYPES)))


def decoded(record: ChunkRecord, codec: Codec, tokens: int) -> tuple[Codec, np.ndarray]:
    """What became of the first ``tokens``, and under which codec."""
    encoded = encode(record, codec)
    head = parse_head(encoded.head)
    out = np.zeros(record.layout.shape(tokens), record.kv.dtype)
    decode(head, encoded.body, out)
    return head.codec, to_floats(out, record.layout.dtype)


@given(records(), st.sampled_from(LOSSY), st.data())
def test_values_move_by_half_a_step_at_most(record, codec, data):
    tokens = data.draw(st.integers(1, len(record.token_ids)))
    was = to_floats(record.kv, record.layout.dtype)

    used, now = decoded(record, codec, tokens)

    size = np.abs(was)
    if used is Codec.HALF:
        allowed = size * 2.0**-11 + 2.0**-25
    elif used is Codec.SPLIT:
        allowed = np.zeros_like(size)
    else:
        steps = size.copy()
        steps[:, 0] = size[:, 0].max(axis=2, keepdims=True)
        steps[:, 1] = size[:, 1].max(axis=3, keepdims=True)
        rounding = ROUNDING[record.layout.dtype]
        # Half a step, its own rounding, that of the dtype, and float16's and float32's smallest.
        allowed = steps / 127 * 0.5001 + steps * rounding + 2.0**-24
    assert (np.abs(now - was[:, :, :, :tokens]) <= allowed[:, :, :, :tokens]).all()
    assert used is (Codec.SPLIT if codec is Codec.HALF and record.layout.itemsize == 2 else codec)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32(LARGEST) * 1.001])
def test_what_cannot_be_held_is_kept_losslessly(codec, value):
    values = np.ones((2, 2, 1, 4, 4), np.float32)
    values[1, 1, 0, 3, 2] = value
    record = record_of(values)
    encoded = encode(record, codec)
    out = np.zeros_like(record.kv)

    decode(parse_head(encoded.head), encoded.body, out)

    assert parse_head(encoded.head).lossless
    np.testing.assert_array_equal(out, record.kv)


def test_the_largest_values_fit():
    assert fits(np.array([LARGEST, -LARGEST], np.float32))
    used, now = decoded(record_of(np.full((1, 2, 1, 2, 2), LARGEST, np.float32)), Codec.INT8, 2)
    assert used is Codec.INT8
    assert np.abs(now - LARGEST).max() <= LARGEST / 127


@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_bits_of_every_dtype_survive_float32(bits, dtype):
    kind = np.uint32 if dtype == "float32" else np.uint16
    given_bits = np.array([bits & np.iinfo(kind).max], kind)
    values = to_floats(given_bits, dtype)
    if np.isfinite(values).all():
        assert to_bits(values, dtype) == given_bits


@pytest.mark.parametrize(("codec", "ratio"), [(Codec.HALF, 2.0), (Codec.INT8, 3.5)])
def test_they_are_smaller(codec, ratio):
    values = np.random.default_rng(0).standard_normal((2, 2, 2, 64, 64)).astype(np.float32)
    record = record_of(values)
    assert encode(record, codec).nbytes * ratio <= record.kv.nbytes


@given(records(), st.sampled_from(LOSSY), st.data())
def test_any_flipped_bit_is_noticed(record, codec, data):
    encoded = encode(record, codec)
    body = bytearray(encoded.body)
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord):
        decode(parse_head(encoded.head), bytes(body), np.zeros_like(record.kv))


RECORD = record_of(np.random.default_rng(1).standard_normal((2, 2, 1, 8, 4)).astype(np.float32))


def load(store: ChunkStore, *, may_be_lossy: bool) -> bool:
    """Whether ``RECORD`` is loaded; wrong values raise."""
    out = np.zeros_like(RECORD.kv)
    item = LoadItem(RECORD.key, RECORD.token_ids, RECORD.layout, out, may_be_lossy=may_be_lossy)
    (outcome,) = store.load([item])
    if outcome.ok:
        near = np.abs(out.view(np.float32) - RECORD.kv.view(np.float32)).max()
        assert near <= (0.05 if may_be_lossy else 0.0)
    return outcome.ok


def disk(folder: Path, codec: Codec) -> LmdbStore:
    return LmdbStore(ShardWriter(folder, ShardSettings(1 << 20), ManualClock()), codec)


def test_a_shard_gives_them_to_no_exact_load(tmp_path):
    store = disk(tmp_path, Codec.INT8)
    store.put([RECORD])

    found = store.find([RECORD.key])

    assert not found[RECORD.key].lossless
    assert not load(store, may_be_lossy=False)
    assert load(store, may_be_lossy=True)
    assert usable(found, "test", share_across_classes=True) == {}
    assert set(usable(found, "test", share_across_classes=False, approximate=True)) == {RECORD.key}
    assert usable(found, "other", share_across_classes=False, approximate=True) == {}
    store.close()


def test_a_lossless_record_takes_the_place_of_a_lossy_one_and_keeps_it(tmp_path):
    for codec, lossless in ((Codec.INT8, False), (Codec.SPLIT, True), (Codec.INT8, True)):
        store = disk(tmp_path, codec)
        assert store.put([RECORD]) == 1
        assert store.find([RECORD.key])[RECORD.key].lossless is lossless
        assert serves(store.find([RECORD.key])[RECORD.key], RECORD) is lossless
        store.close()


def test_ram_is_not_filled_with_them(tmp_path):
    clock = ManualClock()
    memory = MemoryStore(1 << 20, clock)
    store = TieredStore(memory, disk(tmp_path, Codec.INT8))
    store.put([RECORD])
    assert store.flush(10.0)
    assert load(store, may_be_lossy=False)  # as it was computed, from RAM

    memory.delete([RECORD.key])

    assert load(store, may_be_lossy=True)
    assert memory.find([RECORD.key]) == {}
    assert not load(store, may_be_lossy=False)
    store.close()


def test_another_node_gives_them_to_no_exact_load():
    clock = ManualClock()
    shards = SimulatedShards(["n0", "n1"], clock, np.random.default_rng(0))
    shards.hold("n1", encode(RECORD, Codec.HALF))
    store = NodeStore("n0", shards, ClientLimits(refresh_s=3600.0), clock, codec=Codec.HALF)
    store.refresh()

    assert not store.find([RECORD.key])[RECORD.key].lossless
    assert not load(store, may_be_lossy=False)
    assert load(store, may_be_lossy=True)

    assert store.put([tiny_record(2)]) == 1
    assert parse_head(shards.records["n0"][tiny_record(2).key].head).lossless  # random bits
    assert store.put([replace(RECORD, key=bytes(32))]) == 1
    assert not parse_head(shards.records["n0"][bytes(32)].head).lossless
    store.close()
