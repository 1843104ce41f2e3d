"""How much each token's values depend on what stands in front of its chunk.

Learned when a content is computed behind a second prefix: the squared difference of its values
(which have no position) in both places, per layer relative to that layer's mean, averaged over
layers and heads. Kept in the store as a record of its own: one float32 per token, under a key that
names the content. Costs nothing on the critical path.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np

from rakv_cluster.chunking.keys import id_bytes
from rakv_cluster.kv.layout import KvDtype, KvLayout
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.reuse.selection import Floats
from rakv_cluster.store.base import ChunkStore, LoadItem
from rakv_cluster.store.donors import donated_content

log = logging.getLogger(__name__)

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32")
"""Of a sensitivity record: the figures lie where a layer's values would."""


def sensitivity_key(ns: bytes, token_ids: Sequence[int]) -> bytes:
    """Names what is known of these tokens' sensitivity, wherever they stand."""
    return sha256(ns + b"S" + id_bytes(token_ids)).digest()


def sensitivity(first: np.ndarray, second: np.ndarray, dtype: KvDtype) -> Floats:
    """float32 ``[n]`` from the KV bits ``[layers, 2, kv_heads, n, head_dim]`` of the same tokens
    behind two prefixes."""
    difference = _floats(first[:, 1], dtype) - _floats(second[:, 1], dtype)
    squares = np.square(difference, out=difference).sum(axis=(1, 3))
    means = squares.mean(axis=1, keepdims=True)
    relative = squares / np.where(means > 0, means, 1.0)
    figures: Floats = relative.mean(axis=0, dtype=np.float32)
    return figures


def learn(record: ChunkRecord, store: ChunkStore) -> bool:
    """Compare a record that was just made with what ``store`` has of its content elsewhere.

    Does nothing if the content's sensitivity is known or there is nothing to compare; whether
    anything was learned. Never raises: a store that fails teaches nothing.
    """
    try:
        return _learn(record, store)
    except Exception:  # the boundary to any store: it never breaks a request
        log.warning("a store failed while sensitivity was learned", exc_info=True)
        return False


def known(ns: bytes, contents: Sequence[Sequence[int]], store: ChunkStore) -> list[Floats]:
    """Sensitivity of each content's tokens, NaN where it is not stored."""
    figures = [np.full((1, 2, 1, len(ids), 1), np.nan, dtype=np.float32) for ids in contents]
    items = [
        LoadItem(
            sensitivity_key(ns, ids), tuple(ids), LAYOUT, out.view(np.uint32), may_be_lossy=True
        )
        for ids, out in zip(contents, figures, strict=True)
    ]
    outcomes = store.load(items)
    result: list[Floats] = []
    for index, out in enumerate(figures):
        loaded = index < len(outcomes) and outcomes[index].ok
        result.append(out[0, 1, 0, :, 0] if loaded else np.full(out.shape[3], np.nan, np.float32))
    return result


def _learn(record: ChunkRecord, store: ChunkStore) -> bool:
    content = donated_content(record)
    key = sensitivity_key(record.namespace, record.token_ids)
    donors: Mapping[bytes, bytes] = store.donors([content]) if content else {}
    if donors.get(content, record.key) == record.key or store.find([key]):
        return False
    other = np.empty_like(record.kv)
    (loaded,) = store.load([LoadItem(donors[content], record.token_ids, record.layout, other)])
    if not loaded.ok:
        return False
    figures = np.zeros((1, 2, 1, len(record.token_ids), 1), dtype=np.float32)
    figures[0, 1, 0, :, 0] = sensitivity(record.kv, other, record.layout.dtype)
    kept = ChunkRecord(
        key, record.namespace, record.token_ids, 0, LAYOUT, figures.view(np.uint32),
        0.0, record.numeric_class, record.created_s,
    )  # fmt: skip
    return store.put([kept]) == 1


def _floats(raw: np.ndarray, dtype: KvDtype) -> Floats:
    """Bits as float32; numpy knows no bfloat16."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    half: Floats = raw.view(np.dtype(dtype)).astype(np.float32)
    return half
