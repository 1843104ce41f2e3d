"""Carrying out a blend: find donors, load them into a sequence's buffer, move their keys.

Runs on a loader thread behind the exact part of a load. Whatever a store does, the outcome is a
list of positions to compute such that every other one below them holds KV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from rakv_cluster.chunking.openings import Openings
from rakv_cluster.kv.buffer import KvBuffer, Positions, no_positions
from rakv_cluster.kv.layout import KvLayout, bits
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.drift import NO_DRIFT, Drift
from rakv_cluster.reuse.blending import (
    Bill,
    DonorLoad,
    chunk_guesses,
    content_hits,
    offset_guesses,
    positions_to_compute,
    reused_positions,
)
from rakv_cluster.reuse.calibration import Calibration, Choice, refused
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.planner import usable
from rakv_cluster.reuse.probing import NO_PROBE, NOT_PROBED, Probe, ProbeSettings
from rakv_cluster.reuse.selection import Selector, default_selector
from rakv_cluster.reuse.traits import Trait, known
from rakv_cluster.store.base import ChunkStore, LoadItem
from rakv_cluster.types import BlendWish, ChunkedPrompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlendSupport:
    """What a model brings to blending: how its keys move, what it costs in fidelity.

    ``calibration`` is asked by every request that blends, on its loader's thread.
    """

    rotation: KeyRotation
    calibration: Callable[[], Calibration] = Calibration
    selector: Selector = default_selector
    probe: ProbeSettings = NOT_PROBED


NO_BLENDING = BlendSupport(KeyRotation.refused("this engine does not blend"))


@dataclass(frozen=True, slots=True, eq=False)
class Blended:
    """``to_compute`` are the positions left, ascending; empty: nothing was blended, for ``reason``.

    Of the reused positions ``kept`` are as they were loaded and ``repaired`` are among those to
    compute; ``first`` is the first of them all. ``expected_kl`` is -1 where it is not known. With a
    pending ``probe`` the positions left are its first pass; :meth:`settled` says what comes then.
    ``probed``: that pass has run. ``runs`` are those of :class:`Drift`, moved by ``rotation``.
    """

    to_compute: Positions = field(default_factory=no_positions)
    first: int = 0
    kept: int = 0
    repaired: int = 0
    expected_kl: float = -1.0
    reason: str = ""
    probe: Probe = NO_PROBE
    probed: bool = False
    rotation: KeyRotation = NO_DRIFT.rotation
    runs: Positions = field(default_factory=no_positions)

    @property
    def drift(self) -> Drift:
        """How what is kept follows the repair. A probe's first pass repairs nothing."""
        if self.probe.pending:
            return NO_DRIFT
        return Drift(self.rotation, self.runs, self.to_compute)

    def settled(self) -> Blended:
        """After the probe's pass: the repair that it chose."""
        probe = self.probe
        repaired = probe.select()
        left = positions_to_compute(
            probe.reused.positions, repaired, covered=probe.covered, total=probe.total
        )
        return replace(self, to_compute=left, probe=NO_PROBE, probed=True)


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
        choices = self._choices(wish)
        if choices[0].refusal:
            return Blended(reason=choices[0].refusal)
        try:
            return self._blend(
                wish, choices, prompt, buffer, costs, covered=covered, total=known_tokens
            )
        except Exception:  # the boundary to any store: nothing it raises may get out
            log.warning("a store failed while a prompt was blended; computing", exc_info=True)
            # A load that broke off may have left NaN, which a masked attention would still read.
            buffer.slots(covered, buffer.capacity).zero_()
            return Blended(reason="the store failed")

    def _choices(self, wish: BlendWish) -> tuple[Choice, ...]:
        """What meets the wish, without a probe and with one; or one refusal."""
        support = self.support
        if wish.refusal:
            return (refused(wish.refusal),)
        if support.rotation.refusal:
            return (refused(f"keys cannot be moved: {support.rotation.refusal}"),)
        calibration = support.calibration()
        ways = (False, True) if wish.probe and support.probe.layers else (False,)
        if wish.recompute < 0:
            choices = [calibration.choose(wish.max_kl, probed=way) for way in ways]
            met = tuple(choice for choice in choices if not choice.refusal)
            return met or (choices[-1],)
        expected = calibration.expected_kl
        return tuple(
            Choice(wish.recompute, expected(wish.recompute, probed=way), probed=way) for way in ways
        )

    def _blend(
        self,
        wish: BlendWish,
        choices: Sequence[Choice],
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
        bill = Bill(loads, costs, covered, total)
        choice = self._chosen(wish, choices, bill)
        if self.price_loads and bill.choice_ms(choice) >= bill.exact_ms:
            return Blended(reason="computing is expected to be faster")
        loads = self._load(loads, buffer)
        if not loads:
            return Blended(reason="the store delivered nothing")
        contents = [load.token_ids for load in loads]
        sensitivity, importance = (
            known(prompt.namespace, trait, contents, self.store)
            for trait in (Trait.SENSITIVITY, Trait.IMPORTANCE)
        )
        reused = reused_positions(loads, sensitivity, importance)
        count = round(choice.fraction * len(reused.positions))
        repaired = self.support.selector(reused, count)
        blended = Blended(
            positions_to_compute(reused.positions, repaired, covered=covered, total=total),
            first=loads[0].start,
            kept=len(reused.positions) - len(repaired),
            repaired=len(repaired),
            expected_kl=choice.expected_kl,
            rotation=self.support.rotation,
            runs=reused.runs,
        )
        # With nothing or everything to repair there is nothing to find out.
        if not choice.probed or not blended.kept or not blended.repaired:
            return blended
        probe = Probe.of(self.support.probe, reused, count, covered=covered, total=total)
        return replace(blended, to_compute=probe.first_pass(), probe=probe)

    def _chosen(self, wish: BlendWish, choices: Sequence[Choice], bill: Bill) -> Choice:
        """The cheapest. Of one forced fraction that is never the probed one, which is taken unless
        the probe is a large part of it all."""
        if wish.recompute >= 0 and len(choices) > 1:
            limit = self.support.probe.most_share * bill.repair_ms(wish.recompute)
            return choices[bill.probe_ms <= limit]
        return min(choices, key=bill.choice_ms)

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
