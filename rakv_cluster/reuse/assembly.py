"""From the store into a sequence's buffer.

Runs on a loader thread: everything that may block or fail in the store happens here. Whatever the
store does, the outcome is a number of leading positions whose KV is valid.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.layout import KvLayout, bits
from rakv_cluster.kv.transfer import HOST_TRANSFER, Transfer
from rakv_cluster.reuse.blender import Blended
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.flights import Claimant, Departure, cold_chunks, give_up
from rakv_cluster.reuse.metering import MeteredStore
from rakv_cluster.reuse.planner import (
    PlannedLoad,
    ReusePlan,
    last_border,
    plan_reuse,
    stored_path,
    usable,
)
from rakv_cluster.store.base import ChunkStore, Found, Loaded, LoadItem
from rakv_cluster.types import Chunk, ChunkedPrompt, Tier

log = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20
"""Loads are run in batches of about this many bytes, so that progress counts if time runs out."""


@dataclass(frozen=True, slots=True)
class Source:
    """A load that filled slots ``[start, end)``: from which tier, made by which numeric class."""

    start: int
    end: int
    tier: Tier
    numeric_class: str


@dataclass(frozen=True, slots=True)
class Assembled:
    """Slots below ``tokens`` hold valid KV; ``sources`` lists the loads, in order.

    ``failed`` counts items that the store found but did not deliver.
    """

    tokens: int
    sources: tuple[Source, ...] = ()
    stored_keys: frozenset[bytes] = frozenset()
    failed: int = 0


def find_path(
    prompt: ChunkedPrompt,
    store: ChunkStore,
    *,
    have: int,
    numeric_class: str,
    share_across_classes: bool,
    settle: Callable[[Sequence[bytes]], None] = lambda _: None,
) -> tuple[tuple[PlannedLoad, ...], frozenset[bytes]]:
    """The stored prefix of ``prompt`` and the keys of its chunks that are stored.

    Asks the store in batches: all chunks at once, then along the chain of tail records, each of
    which holds at least one token. ``settle`` is called with the keys before each batch: it lets
    writes of this replica that are under way arrive.
    """

    def find(keys: Sequence[bytes]) -> dict[bytes, Found]:
        settle(keys)
        wanted = set(keys)
        found = {key: each for key, each in store.find(keys).items() if key in wanted}
        return usable(found, numeric_class, share_across_classes=share_across_classes)

    asked = {chunk.prefix_key for chunk in prompt.chunks}
    found = find([chunk.prefix_key for chunk in prompt.chunks]) if asked else {}
    stored = frozenset(chunk.prefix_key for chunk in prompt.chunks if chunk.prefix_key in found)
    for _ in range(len(prompt.token_ids)):
        path = stored_path(prompt, found, asked, have)
        if not path.probe:
            break
        asked |= set(path.probe)
        found |= find(path.probe)
    return path.loads, stored


def load_plan(
    plan: ReusePlan,
    store: ChunkStore,
    buffer: KvBuffer,
    layout: KvLayout,
    *,
    transfer: Transfer = HOST_TRANSFER,
    have: int = 0,
    progress: Callable[[Assembled], bool] = lambda _: True,
) -> Assembled:
    """Run the plan's loads into ``buffer``'s slots, batch by batch, up to the first failure.

    ``progress`` is called before and after each batch with the state so far and says whether to
    go on: slots below ``state.tokens`` are valid and not written again. Leaves ``buffer.length``
    alone. The first load may start below ``have`` (inside a chunk that is partly there), so its
    failure can cost slots that were valid before.
    """
    state = Assembled(tokens=have, stored_keys=plan.stored_keys)
    for batch in _batches(plan.loads):
        state = replace(state, tokens=min(state.tokens, batch[0].start))
        if not progress(state):
            break
        outcomes = _load_batch(batch, store, buffer, layout, transfer)
        state = _advance(state, batch, outcomes)
        if state.failed:
            # What a failed load leaves may be NaN, which a masked attention would still read.
            buffer.slots(state.tokens, batch[-1].end).zero_()
        if not progress(state) or state.failed:
            break
    return state


def _advance(state: Assembled, batch: list[PlannedLoad], outcomes: list[Loaded]) -> Assembled:
    good = 0
    while good < len(batch) and good < len(outcomes) and outcomes[good].ok:
        good += 1
    done = list(zip(batch[:good], outcomes[:good], strict=True))
    tokens = batch[good - 1].end if good else batch[0].start
    return Assembled(
        tokens=tokens,
        sources=state.sources
        + tuple(
            Source(load.start, load.end, outcome.tier, load.numeric_class) for load, outcome in done
        ),
        stored_keys=state.stored_keys - {load.key for load in batch[good:]},
        failed=len(batch) - good,
    )


def _batches(loads: tuple[PlannedLoad, ...]) -> list[list[PlannedLoad]]:
    """Split by tier and size: a batch's time is one tier's, and none is much over the limit."""
    batches: list[list[PlannedLoad]] = []
    size = 0
    for load in loads:
        size += load.stored_bytes
        if not batches or size > _BATCH_BYTES or batches[-1][-1].tier != load.tier:
            batches.append([])
            size = load.stored_bytes
        batches[-1].append(load)
    return batches


def _load_batch(
    batch: list[PlannedLoad],
    store: ChunkStore,
    buffer: KvBuffer,
    layout: KvLayout,
    transfer: Transfer,
) -> list[Loaded]:
    slots = [buffer.slots(load.start, load.end) for load in batch]
    landings = [transfer.landing(each, layout) for each in slots]
    items = [
        LoadItem(load.key, load.token_ids, layout, bits(landing), numeric_class=load.numeric_class)
        for load, landing in zip(batch, landings, strict=True)
    ]
    try:
        outcomes = store.load(items)
    except Exception:  # the boundary to any store: an error is a miss
        log.warning("a store failed in load; computing instead", exc_info=True)
        return []
    transfer.to_device(list(zip(slots, landings, strict=True)))
    return outcomes


def _no_blend(store: ChunkStore, buffer: KvBuffer, covered: int) -> Blended:
    return Blended()


@dataclass(slots=True, eq=False)
class LoadJob:
    """One request's find, plan, claim and load, run by a loader thread, watched by the engine.

    ``blend`` fills slots behind the exact ones from a store, from the position it is given on;
    what came of it is ``blended`` once the job is done.

    What is not stored among the first ``prompt_tokens`` is claimed by ``claimant``; ``departure``
    says with what result once the job is done.

    The engine polls :attr:`done`, and may :meth:`abandon` the job: from then on the buffer given
    to it belongs to the loader thread, except for the slots below ``state.tokens``, which it will
    not write again.
    """

    prompt: ChunkedPrompt
    buffer: KvBuffer | None
    layout: KvLayout
    transfer: Transfer
    store: MeteredStore
    costs: CostView
    numeric_class: str
    share_across_classes: bool
    price_loads: bool
    have: int
    claimant: Claimant
    prompt_tokens: int
    settle: Callable[[Sequence[bytes]], None]
    wake: Callable[[], None]
    blend: Callable[[ChunkStore, KvBuffer, int], Blended] = _no_blend
    blended: Blended = field(default_factory=Blended)
    state: Assembled = field(init=False)
    departure: Departure = field(default_factory=Departure)
    done: bool = False
    _abandoned: bool = False
    _left: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.state = Assembled(tokens=self.have)

    @property
    def untouched(self) -> int:
        """Slots below it are never written; those from there to ``have`` may be, once more."""
        return last_border(self.prompt, self.have)[0]

    def run(self) -> None:
        """Do it. Never raises: a store that does is a store without this prompt."""
        try:
            self._run()
        except Exception:  # the boundary to any store: nothing it raises may get out
            log.warning("a store failed in find; computing instead", exc_info=True)
            self._report(replace(self.state, failed=self.state.failed + 1))
        finally:
            self.done = True
            self.wake()

    def abandon(self) -> Assembled:
        """Stop waiting for it; what is valid so far, and stays so.

        A job that has not begun never touches its buffer.
        """
        with self._lock:
            self._abandoned = True
            self.buffer = None
            return self.state

    def leave(self) -> tuple[Chunk, ...]:
        """Its request ends: what it has claimed so far. Later claims it gives up by itself."""
        with self._lock:
            self._left = True
            return self.departure.claimed

    def _run(self) -> None:
        with self._lock:
            buffer = self.buffer
        if buffer is None:
            return
        plan = self._look()
        if not self._report(Assembled(tokens=self.have, stored_keys=plan.stored_keys)):
            return
        plan, departure = self.claimant.depart(plan, self._look, self._cold, self.costs)
        with self._lock:
            self.departure, left = departure, self._left
        if left:
            give_up(departure.claimed, self.claimant.flight, self.claimant.holder)
            return
        state = load_plan(
            plan,
            self.store,
            buffer,
            self.layout,
            transfer=self.transfer,
            have=self.have,
            progress=self._report,
        )
        if self._report(state):
            self.blended = self.blend(self.store, buffer, state.tokens)

    def _look(self) -> ReusePlan:
        """What is stored now, and which of it to load."""
        loads, stored = find_path(
            self.prompt,
            self.store,
            have=self.have,
            numeric_class=self.numeric_class,
            share_across_classes=self.share_across_classes,
            settle=self.settle,
        )
        if not self.price_loads:
            return ReusePlan(loads, stored)
        return plan_reuse(self.prompt, loads, self.costs, have=self.have, stored_keys=stored)

    def _cold(self, plan: ReusePlan) -> tuple[Chunk, ...]:
        if any(load.numeric_class != self.numeric_class for load in plan.loads):
            return ()  # what is computed behind other rounding is not stored
        return cold_chunks(self.prompt, plan, have=self.have, prompt_tokens=self.prompt_tokens)

    def _report(self, state: Assembled) -> bool:
        """Publish the state; False when nobody waits for it any more."""
        with self._lock:
            self.state = state
            return not self._abandoned
