"""Carrying out a blend: find donors, load them into a sequence's buffer, move their keys.

Runs on a loader thread behind the exact part of a load. Whatever a store does, the outcome is a
list of positions to compute such that every other one below them holds KV.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rakv_cluster.chunking.openings import Openings
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.layout import KvLayout, bits
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.reuse.blending import (
    DonorLoad,
    chunk_guesses,
    compute_ms,
    content_hits,
    offset_guesses,
    positions_to_compute,
    reused_positions,
)
from rakv_cluster.reuse.calibration import Calibration, Choice
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.planner import usable
from rakv_cluster.reuse.selection import Positions, Selector, no_positions, sensitive_else_first
from rakv_cluster.reuse.sensitivity import known
from rakv_cluster.store.base import ChunkStore, LoadItem
from rakv_cluster.types import BlendWish, ChunkedPrompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlendSupport:
    """What a model brings to blending: how its keys move, what it costs in fidelity."""

    rotation: KeyRotation
    calibration: Calibration = field(default_factory=Calibration)
    selector: Selector = sensitive_else_first


NO_BLENDING = BlendSupport(KeyRotation.refused("this engine does not blend"))


@dataclass(frozen=True, slots=True, eq=False)
class Blended:
    """``to_compute`` are the positions left, ascending; empty: nothing was blended, for ``reason``.

    Of the reused positions ``kept`` are as they were loaded and ``repaired`` are among those to
    compute; ``first`` is the first of them all. ``expected_kl`` is -1 where it is not known.
    """

    to_compute: Positions = field(default_factory=no_positions)
    first: int = 0
    kept: int = 0
    repaired: int = 0
    expected_kl: float = -1.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Blender:
    """Blends prompts of one model from one store. Any thread may use it."""

    support: BlendSupport
    store: ChunkStore
    layout: KvLayout
    numeric_class: str
    share_across_classes: bool
    price_loads: bool
    openings: Openings

    def blend(
        self,
        wish: BlendWish,
        prompt: ChunkedPrompt,
        buffer: KvBuffer,
        costs: CostView,
        *,
        covered: int,
        known_tokens: int,
    ) -> Blended:
        """Fill ``buffer`` behind its ``covered`` exact slots as far as donors go.

        ``known_tokens`` are the prompt's and those generated so far. Never raises: what a store
        does not deliver is computed.
        """
        choice = self._choice(wish)
        if choice.refusal:
            return Blended(reason=choice.refusal)
        try:
            return self._blend(choice, prompt, buffer, costs, covered=covered, total=known_tokens)
        except Exception:  # the boundary to any store: nothing it raises may get out
            log.warning("a store failed while a prompt was blended; computing", exc_info=True)
            # A load that broke off may have left NaN, which a masked attention would still read.
            buffer.slots(covered, buffer.capacity).zero_()
            return Blended(reason="the store failed")

    def _choice(self, wish: BlendWish) -> Choice:
        if wish.refusal:
            return Choice(1.0, 0.0, wish.refusal)
        if self.support.rotation.refusal:
            return Choice(1.0, 0.0, f"keys cannot be moved: {self.support.rotation.refusal}")
        if wish.recompute < 0:
            return self.support.calibration.choose(wish.max_kl)
        return Choice(wish.recompute, self.support.calibration.expected_kl(wish.recompute))

    def _blend(
        self,
        choice: Choice,
        prompt: ChunkedPrompt,
        buffer: KvBuffer,
        costs: CostView,
        *,
        covered: int,
        total: int,
    ) -> Blended:
        loads = self._hits(prompt, covered)
        if not loads:
            return Blended(reason="no cached text behind the exact prefix")
        if self.price_loads and not self._pays(choice, loads, costs, covered, total):
            return Blended(reason="computing is expected to be faster")
        loads = self._load(loads, buffer)
        if not loads:
            return Blended(reason="the store delivered nothing")
        contents = [load.token_ids for load in loads]
        reused = reused_positions(loads, known(prompt.namespace, contents, self.store))
        count = round(choice.fraction * len(reused.positions))
        repaired = self.support.selector(reused, count)
        return Blended(
            positions_to_compute(reused.positions, repaired, covered=covered, total=total),
            first=loads[0].start,
            kept=len(reused.positions) - len(repaired),
            repaired=len(repaired),
            expected_kl=choice.expected_kl,
        )

    def _hits(self, prompt: ChunkedPrompt, covered: int) -> tuple[DonorLoad, ...]:
        # At chunk borders first: those hits lie side by side.
        guesses = chunk_guesses(prompt, covered) + offset_guesses(prompt, self.openings, covered)
        wanted = list({guess.content_key for guess in guesses})
        donors = self.store.donors(wanted) if wanted else {}
        found = self.store.find(list(donors.values())) if donors else {}
        mine = usable(
            found,
            self.numeric_class,
            share_across_classes=self.share_across_classes,
            approximate=True,
        )
        return content_hits(guesses, donors, mine)

    @staticmethod
    def _pays(
        choice: Choice, loads: Sequence[DonorLoad], costs: CostView, covered: int, total: int
    ) -> bool:
        """Whether loading and repairing should be faster than computing everything."""
        reused = np.concatenate([np.arange(load.start, load.end) for load in loads])
        # Which ones are repaired hardly matters to the time: as many, evenly spread.
        count = round(choice.fraction * len(reused))
        some = reused[np.linspace(0, len(reused) - 1, count).astype(np.int64)]
        left = positions_to_compute(reused, some, covered=covered, total=total)
        load_ms = sum(costs.load_ms(load.tier, load.stored_bytes) for load in loads)
        return load_ms + compute_ms(left, costs) < costs.prefill_ms(covered, total)

    def _load(self, loads: Sequence[DonorLoad], buffer: KvBuffer) -> tuple[DonorLoad, ...]:
        """Those of ``loads`` that are in their slots now, keys moved. The others' slots hold zeros:
        what a failed load leaves may be NaN, which a masked attention would still read."""
        on_host = buffer.data.device.type == "cpu"
        targets = [
            buffer.slots(load.start, load.end)
            if on_host
            else torch.empty(self.layout.shape(len(load.token_ids)), dtype=self.layout.torch_dtype)
            for load in loads
        ]
        items = [
            LoadItem(load.key, load.token_ids, self.layout, bits(target), may_be_lossy=True)
            for load, target in zip(loads, targets, strict=True)
        ]
        outcomes = self.store.load(items)
        good: list[DonorLoad] = []
        for index, (load, target) in enumerate(zip(loads, targets, strict=True)):
            slots = buffer.slots(load.start, load.end)
            if index >= len(outcomes) or not outcomes[index].ok:
                slots.zero_()
                continue
            if not on_host:
                slots.copy_(target)
            good.append(load)
        for run in _runs(good):
            keys = buffer.data[:, 0, :, run[0].start : run[-1].end]
            self.support.rotation.move(keys, run[0].distance)
        return tuple(good)


def _runs(loads: Sequence[DonorLoad]) -> Iterator[list[DonorLoad]]:
    """Loads side by side that move by one distance."""
    run: list[DonorLoad] = []
    for load in loads:
        if run and (run[-1].end != load.start or run[-1].distance != load.distance):
            yield run
            run = []
        run.append(load)
    if run:
        yield run
