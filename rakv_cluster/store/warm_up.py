"""Fills RAM from disk before a replica takes requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rakv_cluster.clock import Clock
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.store.base import ChunkStore, LoadItem
from rakv_cluster.types import Tier


@dataclass(frozen=True, slots=True)
class WarmUpLimits:
    """At most ``budget_bytes`` of KV; no batch of ``batch_keys`` starts after ``longest_s``."""

    budget_bytes: int
    longest_s: float
    batch_keys: int = 32


def warm_up(
    store: ChunkStore,
    keys: Sequence[bytes],
    layout: KvLayout,
    limits: WarmUpLimits,
    clock: Clock,
) -> int:
    """Load the records under ``keys`` in this order, so that a tier in front keeps them.

    Returns the bytes of KV that came. What is gone, lossy, of another layout or in RAM already is
    passed over.
    """
    ends_s = clock.monotonic_s() + limits.longest_s
    loaded_bytes = 0
    for start in range(0, len(keys), limits.batch_keys):
        if clock.monotonic_s() >= ends_s:
            break
        items = _items(store, keys[start : start + limits.batch_keys], layout)
        while items and loaded_bytes + sum(item.out.nbytes for item in items) > limits.budget_bytes:
            items.pop()
        if not items:
            continue
        loaded = store.load(items)
        loaded_bytes += sum(
            item.out.nbytes for item, each in zip(items, loaded, strict=True) if each.ok
        )
    return loaded_bytes


def _items(store: ChunkStore, keys: Sequence[bytes], layout: KvLayout) -> list[LoadItem]:
    found = store.find(keys)
    return [
        LoadItem(
            key,
            found[key].token_ids,
            layout,
            np.empty(layout.shape(len(found[key].token_ids)), dtype=f"u{layout.itemsize}"),
        )
        for key in dict.fromkeys(keys)
        if key in found and found[key].lossless and found[key].tier is not Tier.RAM
    ]
