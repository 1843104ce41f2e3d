"""How much each token's values depend on what stands in front of its chunk.

Learned when a content is computed behind a second prefix: the squared difference of its values
(which have no position) in both places, per layer relative to that layer's mean, averaged over
layers and heads. Costs nothing on the critical path.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from rakv_cluster.kv.layout import KvDtype
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.reuse.selection import Floats
from rakv_cluster.reuse.traits import Trait, is_known, keep
from rakv_cluster.store.base import ChunkStore, LoadItem
from rakv_cluster.store.donors import donated_content

log = logging.getLogger(__name__)


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


def _learn(record: ChunkRecord, store: ChunkStore) -> bool:
    content = donated_content(record)
    donors: Mapping[bytes, bytes] = store.donors([content]) if content else {}
    if donors.get(content, record.key) == record.key or is_known(record, Trait.SENSITIVITY, store):
        return False
    other = np.empty_like(record.kv)
    (loaded,) = store.load([LoadItem(donors[content], record.token_ids, record.layout, other)])
    if not loaded.ok:
        return False
    figures = sensitivity(record.kv, other, record.layout.dtype)
    return keep(record, Trait.SENSITIVITY, figures, store)


def _floats(raw: np.ndarray, dtype: KvDtype) -> Floats:
    """Bits as float32; numpy knows no bfloat16."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    half: Floats = raw.view(np.dtype(dtype)).astype(np.float32)
    return half
