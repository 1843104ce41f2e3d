"""What is known of a content's tokens, one float32 each, kept in the store beside its KV.

Every kind of figure is a record of its own layout under a key that names kind and content, so that
any store, tier and shard holds it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from hashlib import sha256

import numpy as np

from rakv_cluster.chunking.keys import id_bytes
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.reuse.selection import Floats, unknown
from rakv_cluster.store.base import ChunkStore, LoadItem

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32")
"""Of such a record: the figures lie where a layer's values would."""


class Trait(Enum):
    """Kinds of figures, by what stands for them in a key."""

    SENSITIVITY = b"S"  # how much a token's values change with what stands in front
    IMPORTANCE = b"A"  # how much a question behind the content attended to the token


def trait_key(ns: bytes, trait: Trait, token_ids: Sequence[int]) -> bytes:
    """Names what is known of these tokens, wherever they stand."""
    return sha256(ns + trait.value + id_bytes(token_ids)).digest()


def known(
    ns: bytes, trait: Trait, contents: Sequence[Sequence[int]], store: ChunkStore
) -> list[Floats]:
    """The figures of each content's tokens, NaN where they are not stored."""
    figures = [np.full((1, 2, 1, len(ids), 1), np.nan, dtype=np.float32) for ids in contents]
    items = [
        LoadItem(
            trait_key(ns, trait, ids), tuple(ids), LAYOUT, out.view(np.uint32), may_be_lossy=True
        )
        for ids, out in zip(contents, figures, strict=True)
    ]
    outcomes = store.load(items)
    result: list[Floats] = []
    for index, out in enumerate(figures):
        loaded = index < len(outcomes) and outcomes[index].ok
        result.append(out[0, 1, 0, :, 0] if loaded else unknown(out.shape[3]))
    return result


def is_known(record: ChunkRecord, trait: Trait, store: ChunkStore) -> bool:
    """Whether figures of the record's content are stored."""
    return bool(store.find([trait_key(record.namespace, trait, record.token_ids)]))


def keep(record: ChunkRecord, trait: Trait, figures: Floats, store: ChunkStore) -> bool:
    """Store ``figures`` ``[n]`` of the record's content; whether the store took them."""
    kv = np.zeros((1, 2, 1, len(record.token_ids), 1), dtype=np.float32)
    kv[0, 1, 0, :, 0] = figures
    key = trait_key(record.namespace, trait, record.token_ids)
    kept = ChunkRecord(
        key, record.namespace, record.token_ids, 0, LAYOUT, kv.view(np.uint32),
        0.0, record.numeric_class, record.created_s,
    )  # fmt: skip
    return store.put([kept]) == 1
