"""What a blended prompt reuses, repairs and computes: pure decisions.

Behind its exact prefix, a blended prompt takes chunks wherever equal tokens were computed before
(runs of them, with gaps), moves their keys, and computes the gaps, the tail and a selection of the
reused positions in one forward. From the first reused position on everything is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.selection import Floats, Positions, Reused
from rakv_cluster.store.base import Found
from rakv_cluster.types import ChunkedPrompt, Tier


@dataclass(frozen=True, slots=True)
class DonorLoad:
    """Load the first ``len(token_ids)`` tokens of the record under ``key``, computed from position
    ``donor_start`` on, into slots from ``start`` on."""

    key: bytes
    start: int
    token_ids: tuple[int, ...]
    donor_start: int
    tier: Tier
    stored_bytes: int

    @property
    def end(self) -> int:
        """Position one past the last token loaded."""
        return self.start + len(self.token_ids)

    @property
    def distance(self) -> int:
        """How far its keys have to be moved."""
        return self.start - self.donor_start


def content_hits(
    prompt: ChunkedPrompt,
    donors: Mapping[bytes, bytes],
    found: Mapping[bytes, Found],
    *,
    covered: int,
) -> tuple[DonorLoad, ...]:
    """Chunks behind position ``covered`` that some donor has, in order.

    Never the prompt's last token, whose logits are needed, and nothing at position 0, where KV
    computed elsewhere is no attention sink. A hit counts only if the tokens are equal.
    """
    limit = len(prompt.token_ids) - 1
    loads = []
    for chunk in prompt.chunks:
        key = donors.get(chunk.content_key, b"")
        record = found.get(key)
        wanted = chunk.token_ids[: max(limit - chunk.start, 0)]
        if chunk.start < max(covered, 1) or record is None or not wanted or record.start < 1:
            continue
        if record.token_ids[: len(wanted)] == wanted:
            loads.append(
                DonorLoad(key, chunk.start, wanted, record.start, record.tier, record.stored_bytes)
            )
    return tuple(loads)


def reused_positions(loads: Sequence[DonorLoad], sensitivity: Sequence[Floats]) -> Reused:
    """The positions that ``loads`` (at least one) fill; ``sensitivity`` has an array per load."""
    positions, offsets = [], []
    offset = 0
    for index, load in enumerate(loads):
        before = loads[index - 1] if index else load
        goes_on = index and before.end == load.start and before.distance == load.distance
        offset = offset + len(before.token_ids) if goes_on else 0
        positions.append(np.arange(load.start, load.end))
        offsets.append(np.arange(offset, offset + len(load.token_ids)))
    where = np.concatenate(positions)
    return Reused(
        where,
        np.concatenate(offsets),
        np.concatenate(list(sensitivity)),
        np.full(len(where), np.nan, dtype=np.float32),
    )


def positions_to_compute(
    reused: Positions, repaired: Positions, *, covered: int, total: int
) -> Positions:
    """All of ``[covered, total)`` but what is reused and not repaired, ascending."""
    missing = np.ones(total, dtype=bool)
    missing[:covered] = False
    missing[reused] = False
    missing[repaired] = True
    return np.flatnonzero(missing)


def compute_ms(positions: Positions, costs: CostView) -> float:
    """Milliseconds to compute scattered ``positions``: full steps, each at its last one's depth."""
    total = 0.0
    for begin in range(0, len(positions), costs.step_tokens):
        rows = positions[begin : begin + costs.step_tokens]
        rate = costs.prefill_rate_ms(len(rows), int(rows[-1]))
        total += max(len(rows) * rate, costs.decode_ms(1))
    return total
