"""What a request would take on each replica, in milliseconds, and which replica gets it.

Pure: arrays in, arrays out. DESIGN.md section 9:

    total = backlog + slot wait + min over {no cache; reuse up to a cut} of (load + prefill)
            + expected output x ms per emitted token

That is the request's own time. What its work costs the others is priced beside it
(``crowding_ms``): a millisecond of loading or prefill is a millisecond for every request there, so
a router that minimizes each request's own time spreads cached prompts until all replicas are busy
loading. The pull to the replica that has the KV already grows with the load (docs/adr/0086). Where
much came lately, much will come again (docs/adr/0087).

Reuse here is of whole leading chunks, as in exact mode; the worker's own planner decides again
with what it finds. One request against R replicas and C chunks is a handful of passes over
[R, C] arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]


MAX_CROWDING = 256.0
# Per token that cannot be reached: finite, for a clipped last chunk may have no tokens.
_NEVER_MS = 1e15


class Reach(IntEnum):
    """Where a replica would get a chunk's KV from, cheapest first behind ``NONE``."""

    NONE = 0
    RAM = 1
    DISK = 2
    REMOTE = 3


_NONE = np.uint8(Reach.NONE)


@dataclass(frozen=True, slots=True)
class Work:
    """A request as the score sees it: C leading chunks that end at ``chunk_ends``.

    ``output_tokens`` is an expectation. The prompt's last token is always computed: its logits
    are needed.
    """

    prompt_tokens: int
    chunk_ends: Ints
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is known of R replicas at one moment; every array has length R.

    ``backlog_ms``        work queued in front of a new request
    ``recurring_ms``      work that will come there soon, going by what came lately
    ``open_requests``     requests it runs or queues; ``slots`` of them it runs at once
    ``prefill_ms``        to compute one token at position 0
    ``prefill_slope_ms``  what that grows by per token of context
    ``ram_ms`` ``disk_ms`` ``remote_ms``  to load one token's KV from there
    ``chunk_ms``          to load a chunk, whatever its size
    ``token_ms``          per emitted token of one request alone, at the number of drafts that the
                          replica's controller would use for this kind of work; where it has not
                          seen any, what it expects, rather too little than too much, so that it
                          gets to see some
    ``token_ms_slope``    what that grows by per other open request
    ``hold_ms``           for which a request kept its slot, the last ones on average

    ``measured`` is false as long as no replica has reported costs; the others are then unused.
    """

    backlog_ms: Floats
    recurring_ms: Floats
    open_requests: Floats
    slots: Floats
    prefill_ms: Floats
    prefill_slope_ms: Floats
    ram_ms: Floats
    disk_ms: Floats
    remote_ms: Floats
    chunk_ms: Floats
    token_ms: Floats
    token_ms_slope: Floats
    hold_ms: Floats
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Scores:
    """Terms of each replica's expected time, in ms, and the tokens it would reuse.

    ``total_ms`` is the sum of the request's own terms; ``crowding_ms`` is what it costs others,
    those who come after it included: each ms of its work holds up ``held_up`` of them.
    Before costs are known ``total_ms`` holds uncached tokens x (open requests + 1): an order, not
    a time.
    """

    backlog_ms: Floats
    slot_wait_ms: Floats
    load_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    crowding_ms: Floats
    total_ms: Floats
    reused_tokens: Ints
    held_up: float
    measured: bool

    @property
    def work_ms(self) -> Floats:
        """What the request occupies a replica for until its first token."""
        return self.load_ms + self.prefill_ms

    @property
    def cost_ms(self) -> Floats:
        """What replicas are compared by."""
        return self.total_ms + self.crowding_ms


def crowding(fleet: Fleet, demand: int) -> float:
    """How many others a millisecond of work holds up, less those whom it serves as well.

    It holds up the requests open beside it, each once (docs/adr/0097); at most
    :data:`MAX_CROWDING`, whatever replicas say. ``demand`` other open requests want the same KV:
    work that brings it to one more replica is theirs too.
    """
    beside = float(fleet.open_requests.sum()) / max(len(fleet.open_requests), 1)
    return max(min(beside, MAX_CROWDING) - demand, 0.0)


def score(
    work: Work, reach: npt.NDArray[np.uint8], fleet: Fleet, *, crowding: float = 0.0
) -> Scores:
    """Every replica's terms; see :func:`crowding`.

    ``reach`` is [R, C'] of :class:`Reach`; only the first C' chunks can be reused (what is behind
    :func:`depth` need not be in it).
    """
    ends = np.minimum(work.chunk_ends[: reach.shape[1]], max(work.prompt_tokens - 1, 0))
    if not fleet.measured:
        return _unmeasured(work, reach, ends, fleet)
    load_ms, prefill_ms, reused = _reuse(work, reach, ends, fleet)
    decode_ms = work.output_tokens * (fleet.token_ms + fleet.token_ms_slope * fleet.open_requests)
    excess = np.maximum(fleet.open_requests - fleet.slots + 1, 0.0)
    # Those in front are like the last ones or, where those were short, like this one.
    slot_wait_ms = np.maximum(decode_ms, fleet.hold_ms) * excess / fleet.slots
    return Scores(
        backlog_ms=fleet.backlog_ms,
        slot_wait_ms=slot_wait_ms,
        load_ms=load_ms,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        crowding_ms=crowding * (load_ms + prefill_ms) + fleet.recurring_ms,
        total_ms=fleet.backlog_ms + slot_wait_ms + load_ms + prefill_ms + decode_ms,
        reused_tokens=reused,
        held_up=crowding,
        measured=True,
    )


def depth(reach: npt.NDArray[np.uint8]) -> int:
    """Number of leading chunks that at least one replica reaches without a gap."""
    gaps = np.flatnonzero(reach.max(axis=0, initial=_NONE) == _NONE)
    return int(gaps[0]) if len(gaps) else reach.shape[1]


def _reuse(
    work: Work, reach: npt.NDArray[np.uint8], ends: Ints, fleet: Fleet
) -> tuple[Floats, Floats, Ints]:
    """Load and prefill time at each replica's best cut, and the tokens reused there."""
    replicas, chunks = reach.shape
    starts = np.zeros(chunks + 1, dtype=np.int64)
    starts[1:] = ends
    tokens = starts[1:] - starts[:-1]
    # What it costs more to load a token than to compute it at position 0: [place, R].
    never_ms = np.full(replicas, _NEVER_MS)
    over_ms = np.array((never_ms, fleet.ram_ms, fleet.disk_ms, fleet.remote_ms))
    over_ms -= fleet.prefill_ms
    places = reach * np.intp(replicas) + np.arange(replicas)[:, None]
    # By cut: what it costs more to load up to there than to compute it.
    cost_ms = np.zeros((replicas, chunks + 1))
    steps = cost_ms[:, 1:]
    np.multiply(over_ms.take(places), tokens, out=steps)
    steps -= fleet.prefill_slope_ms[:, None] * (tokens * (starts[1:] + starts[:-1]) / 2)
    steps += fleet.chunk_ms[:, None]
    np.add.accumulate(steps, axis=1, out=steps)
    cut = cost_ms.argmin(axis=1)
    reused = starts[cut]
    saved_ms = fleet.prefill_ms * reused + fleet.prefill_slope_ms * (reused**2 / 2)
    whole = work.prompt_tokens
    whole_ms = fleet.prefill_ms * whole + fleet.prefill_slope_ms * (whole**2 / 2)
    load_ms = np.maximum(cost_ms[np.arange(replicas), cut] + saved_ms, 0.0)
    return load_ms, whole_ms - saved_ms, reused


def _unmeasured(work: Work, reach: npt.NDArray[np.uint8], ends: Ints, fleet: Fleet) -> Scores:
    held = np.logical_and.accumulate(reach != Reach.NONE, axis=1).sum(axis=1)
    reused = np.concatenate(([0], ends))[held]
    nothing = np.zeros(len(held))
    uncached = (work.prompt_tokens - reused).astype(np.float64)
    return Scores(
        backlog_ms=nothing,
        slot_wait_ms=nothing,
        load_ms=nothing,
        prefill_ms=nothing,
        decode_ms=nothing,
        crowding_ms=nothing,
        total_ms=uncached * (fleet.open_requests + 1),
        reused_tokens=reused,
        held_up=0.0,
        measured=False,
    )


class Reason(str, Enum):
    """Why a replica was chosen."""

    FASTEST = "fastest"
    TIED = "tied"
    EXPLORED = "explored"
    UNMEASURED = "unmeasured"
    ONLY = "only"


@dataclass(frozen=True, slots=True)
class Choice:
    """Replicas' indices, the chosen one first, then by cost."""

    order: Sequence[int]
    reason: Reason


@dataclass(frozen=True, slots=True)
class ChoiceSettings:
    """``exploration`` is the share of requests sent anywhere, so that a replica thought slow can
    show that it is not: where the request is more work there, so much more seldom, so that what
    that costs everyone is no more than this share of its work either. What is later than the best
    by at most ``tie_ms`` counts as equal. That is little, because the best may owe its lead to a
    few cached chunks of a long request."""

    exploration: float = 0.01
    tie_ms: float = 1.0
    ranked: int = 4


def choose(
    scores: Scores, candidates: Ints, settings: ChoiceSettings, rng: np.random.Generator
) -> Choice:
    """Pick among ``candidates`` (indices, at least one); at most ``settings.ranked`` are ordered.

    Raises ``FloatingPointError`` if no candidate has a finite expectation.
    """
    cost_ms = scores.cost_ms[candidates]
    ranked = cost_ms.argsort()
    best = int(ranked[0])
    if not math.isfinite(cost_ms[best]):
        raise FloatingPointError("no replica has a finite expected time")
    if len(candidates) == 1:
        return Choice((int(candidates[0]),), Reason.ONLY)
    reason = Reason.FASTEST if scores.measured else Reason.UNMEASURED
    ties = np.count_nonzero(cost_ms <= cost_ms[best] + settings.tie_ms)
    if ties > 1:
        best = int(ranked[rng.integers(ties)])
        reason = Reason.TIED if scores.measured else reason
    if rng.random() < settings.exploration:
        other = int(rng.integers(len(candidates)))
        here, there = scores.work_ms[candidates[[best, other]]].tolist()
        added_ms = max(there - here, 0.0) * (1.0 + scores.held_up)
        if rng.random() * (here + added_ms) <= here:
            best, reason = other, Reason.EXPLORED
    order = [best, *(index for index in ranked[: settings.ranked].tolist() if index != best)]
    return Choice(tuple(candidates[order].tolist()), reason)
