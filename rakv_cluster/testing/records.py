"""Tiny records whose content follows from a number."""

from __future__ import annotations

import hashlib

import numpy as np

from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.store.base import LoadItem

TINY_LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32")
TINY_NAMESPACE = hashlib.sha256(b"tiny").digest()


def tiny_record(number: int, tokens: int = 8, layout: KvLayout = TINY_LAYOUT) -> ChunkRecord:
    """Record ``number``: its key, token ids and KV bits are the same in every process.

    A shorter one is the beginning of a longer one, KV included, as of a tail that grew.
    """
    bits = np.dtype(f"u{layout.itemsize}")
    layers, pair, heads, _, size = layout.shape(tokens)
    kv = np.random.default_rng(number).integers(
        0, np.iinfo(bits).max, (tokens, layers, pair, heads, size), dtype=bits, endpoint=True
    )
    return ChunkRecord(
        key=hashlib.sha256(b"tiny record %d" % number).digest(),
        namespace=TINY_NAMESPACE,
        token_ids=tuple(range(number, number + tokens)),
        start=0,
        layout=layout,
        kv=np.ascontiguousarray(np.moveaxis(kv, 0, 3)),
        cost_ms=1.0,
        numeric_class="test",
        created_s=0.0,
    )


def load_item(record: ChunkRecord) -> LoadItem:
    """Ask for the whole of ``record``, into a fresh array that holds none of its values."""
    return LoadItem(record.key, record.token_ids, record.layout, np.bitwise_not(record.kv))
