"""What a blended prompt reuses, repairs and computes: pure decisions.

Behind its exact prefix, a blended prompt takes chunks wherever equal tokens were computed before
(runs of them, with gaps), moves their keys, and computes the gaps, the tail and a selection of the
reused positions in one forward. From the first reused position on everything is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rakv_cluster.chunking.keys import content_key
from rakv_cluster.chunking.openings import Openings
from rakv_cluster.kv.buffer import Positions
from rakv_cluster.reuse.calibration import Choice
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.selection import Floats, Reused, unknown
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


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens ``[start, end)`` of a prompt that may have been computed elsewhere, and their name."""

    start: int
    token_ids: tuple[int, ...]
    content_key: bytes

    @property
    def end(self) -> int:
        """Position one past the last token."""
        return self.start + len(self.token_ids)


def chunk_guesses(prompt: ChunkedPrompt, covered: int) -> list[Guess]:
    """The prompt's chunks behind position ``covered``.

    Never the prompt's last token, whose logits are needed, and nothing at position 0, where KV
    computed elsewhere is no attention sink.
    """
    limit = len(prompt.token_ids) - 1
    return [
        Guess(chunk.start, chunk.token_ids[: limit - chunk.start], chunk.content_key)
        for chunk in prompt.chunks
        if max(covered, 1) <= chunk.start < limit
    ]


def offset_guesses(prompt: ChunkedPrompt, openings: Openings, covered: int) -> list[Guess]:
    """What may stand anywhere else behind ``covered``: text quoted inside other text."""
    start = max(covered, 1)
    ids = prompt.token_ids
    borders = {(chunk.start, len(chunk.token_ids)) for chunk in prompt.chunks}
    guesses = []
    for at, length in openings.guesses(ids[:-1], start):
        if (at, length) not in borders:
            quoted = ids[at : at + length]
            guesses.append(Guess(at, quoted, content_key(prompt.namespace, quoted)))
    return guesses


def content_hits(
    guesses: Sequence[Guess], donors: Mapping[bytes, bytes], found: Mapping[bytes, Found]
) -> tuple[DonorLoad, ...]:
    """Those of ``guesses`` that some donor has, by position, without overlaps: the first guess
    that claims a token has it. A hit counts only if the tokens are equal."""
    hits: list[DonorLoad] = []
    for guess in guesses:
        key = donors.get(guess.content_key, b"")
        record = found.get(key)
        if record is None or record.start < 1:
            continue
        equal = record.token_ids[: len(guess.token_ids)] == guess.token_ids
        if equal and not any(hit.start < guess.end and guess.start < hit.end for hit in hits):
            hits.append(
                DonorLoad(
                    key, guess.start, guess.token_ids, record.start, record.tier,
                    record.stored_bytes,
                )
            )  # fmt: skip
    return tuple(sorted(hits, key=lambda hit: hit.start))


def reused_positions(
    loads: Sequence[DonorLoad], sensitivity: Sequence[Floats], importance: Sequence[Floats]
) -> Reused:
    """The positions that ``loads`` (at least one) fill; what is known of their tokens has an array
    per load."""
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
        np.concatenate(list(importance)),
        deviation=unknown(len(where)),
        attention=unknown(len(where)),
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


@dataclass(frozen=True, slots=True)
class Bill:
    """What a blend of ``loads`` (at least one) should take, in milliseconds."""

    loads: tuple[DonorLoad, ...]
    costs: CostView
    covered: int
    total: int

    @property
    def exact_ms(self) -> float:
        """Computing everything instead."""
        return self.costs.prefill_ms(self.covered, self.total)

    @property
    def probe_ms(self) -> float:
        """Computing what is not reused, once."""
        return compute_ms(self._left(0.0), self.costs)

    def repair_ms(self, fraction: float) -> float:
        """Loading, then computing what is not reused and ``fraction`` of what is."""
        load_ms = sum(self.costs.load_ms(load.tier, load.stored_bytes) for load in self.loads)
        return load_ms + compute_ms(self._left(fraction), self.costs)

    def choice_ms(self, choice: Choice) -> float:
        """All of it."""
        return self.repair_ms(choice.fraction) + (self.probe_ms if choice.probed else 0.0)

    def _left(self, fraction: float) -> Positions:
        reused = np.concatenate([np.arange(load.start, load.end) for load in self.loads])
        # Which ones are repaired hardly matters to the time: as many, evenly spread.
        count = round(fraction * len(reused))
        some = reused[np.linspace(0, len(reused) - 1, count).astype(np.int64)]
        return positions_to_compute(reused, some, covered=self.covered, total=self.total)
