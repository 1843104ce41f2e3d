"""Which stored KV a request loads: a pure decision over what the store found and what things cost.

The stored prefix of a prompt is a path: complete chunks by prefix key, and where those run out,
open-tail records ("the tokens last seen behind this prefix"). A tail record that is matched to
its last token leads to the prefix key of what it holds, where the path may go on; that is how the
KV of a long answer serves the next turn, whose chunks are cut differently (docs/adr/0030).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from rakv_cluster.chunking.keys import ROOT, head_lengths, prefix_key, tail_key
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.store.base import Found
from rakv_cluster.types import ChunkedPrompt, Tier


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Load the first ``len(token_ids)`` tokens of the record under ``key`` into slots from
    ``start`` on. Replicas of ``numeric_class`` made it."""

    key: bytes
    start: int
    token_ids: tuple[int, ...]
    tier: Tier
    stored_bytes: int
    numeric_class: str = ""

    @property
    def end(self) -> int:
        """Position one past the last token loaded."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StoredPath:
    """The longest prefix found so far; ``probe`` are keys whose presence would lengthen it."""

    loads: tuple[PlannedLoad, ...]
    probe: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Loads to run, in ascending position; empty means: compute everything.

    ``stored_keys`` are chunks of the prompt that need no storing again. ``load_ms`` is what the
    loads should take and ``compute_ms`` what computing the same tokens would.
    """

    loads: tuple[PlannedLoad, ...] = ()
    stored_keys: frozenset[bytes] = frozenset()
    load_ms: float = 0.0
    compute_ms: float = 0.0


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading equal elements of two integer arrays."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


def stored_path(
    prompt: ChunkedPrompt, found: Mapping[bytes, Found], asked: Collection[bytes], have: int
) -> StoredPath:
    """Follow the stored prefix from the last chunk border at or below position ``have``.

    Never covers the prompt's last token, whose logits are needed. ``found`` holds usable records
    only (see :func:`usable`) of the keys ``asked`` so far, the prompt's chunks among them.
    """
    ids = prompt.token_ids
    limit = len(ids) - 1
    chunk_at = {chunk.start: chunk for chunk in prompt.chunks}
    position, parent = last_border(prompt, have)
    loads: list[PlannedLoad] = []
    while position < limit:
        chunk = chunk_at.get(position)
        record = found.get(chunk.prefix_key) if chunk is not None else None
        if chunk is not None and record is not None and record.token_ids == chunk.token_ids:
            wanted = chunk.token_ids[: limit - position]
            loads.append(_load(chunk.prefix_key, position, wanted, record))
            position, parent = chunk.end, chunk.prefix_key
            continue
        wanted = ids[position:limit]
        keys = tail_keys(prompt.namespace, parent, wanted)
        if missing := tuple(key for key in keys if key not in asked):
            return StoredPath(tuple(loads), missing)
        key, shared = _best_tail(keys, found, wanted)
        if not shared:
            break
        loads.append(_load(key, position, wanted[:shared], found[key]))
        tail = found[key].token_ids
        if shared < len(tail):
            break
        position, parent = position + shared, prefix_key(prompt.namespace, parent, tail)
    return StoredPath(tuple(loads), ())


def tail_keys(namespace: bytes, parent: bytes, wanted: tuple[int, ...]) -> list[bytes]:
    """Keys under which a tail behind ``parent`` that begins with ``wanted`` may be filed."""
    return [tail_key(namespace, parent, wanted[:size]) for size in head_lengths(len(wanted))]


def usable(
    found: Mapping[bytes, Found],
    numeric_class: str,
    *,
    share_across_classes: bool,
    approximate: bool = False,
) -> dict[bytes, Found]:
    """Those records that this replica may use: of its numeric class, unless sharing is allowed,
    and lossless, unless the reuse is ``approximate`` anyway."""
    return {
        key: each
        for key, each in found.items()
        if (share_across_classes or each.numeric_class == numeric_class)
        and (approximate or each.lossless)
    }


def plan_reuse(
    prompt: ChunkedPrompt,
    loads: tuple[PlannedLoad, ...],
    costs: CostView,
    *,
    have: int,
    stored_keys: frozenset[bytes] = frozenset(),
) -> ReusePlan:
    """The leading part of ``loads`` that gets the prompt computed soonest; possibly none.

    ``have`` leading tokens are in the buffer already. Every cut of the path is priced as its
    loads plus computing the rest; a load that only saves less than it costs is left out, so that
    a hit is never slower than a miss by these measurements.
    """
    total = len(prompt.token_ids)
    alone_ms = costs.prefill_ms(have, total)
    best_ms, best, best_load_ms = alone_ms, 0, 0.0
    spent_ms = 0.0
    for count, load in enumerate(loads, start=1):
        spent_ms += costs.load_ms(load.tier, load.stored_bytes)
        if load.end <= have:
            continue
        total_ms = spent_ms + costs.prefill_ms(load.end, total)
        if total_ms < best_ms:
            best_ms, best, best_load_ms = total_ms, count, spent_ms
    return ReusePlan(
        loads=loads[:best],
        stored_keys=stored_keys,
        load_ms=best_load_ms,
        compute_ms=alone_ms - (best_ms - best_load_ms),
    )


def last_border(prompt: ChunkedPrompt, have: int) -> tuple[int, bytes]:
    """The last chunk border at or below ``have``, and the key of the prefix that ends there."""
    position, parent = 0, ROOT
    for chunk in prompt.chunks:
        if chunk.end > have:
            break
        position, parent = chunk.end, chunk.prefix_key
    return position, parent


def _best_tail(
    keys: list[bytes], found: Mapping[bytes, Found], wanted: tuple[int, ...]
) -> tuple[bytes, int]:
    """The tail record that shares most leading tokens with ``wanted``, and how many (0: none)."""
    shares = [(_shared(found[key].token_ids, wanted), key) for key in keys if key in found]
    shared, key = max(shares, key=lambda share: share[0], default=(0, b""))
    return key, shared


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return common_prefix(np.asarray(left), np.asarray(right))


def _load(key: bytes, start: int, token_ids: tuple[int, ...], record: Found) -> PlannedLoad:
    return PlannedLoad(
        key, start, token_ids, record.tier, record.stored_bytes, record.numeric_class
    )
