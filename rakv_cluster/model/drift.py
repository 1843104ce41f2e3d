"""Reused KV that follows what repair finds beside it.

KV that is moved behind other text is off, its *drift*: the K and V that the model would compute
there less those that are reused. Neighbours drift alike: a weighted mean over 15% of the tokens
explains a quarter of the squared drift of the other keys, in some layers a half, and a tenth of
the values' (docs/experiments.md). Repair computes the drift of the positions that it recomputes,
layer by layer; here the positions between them are moved by such a mean, before the layer attends,
so that repaired tokens and the question see better neighbours, and drift less themselves in the
layer above.

The mean is Nadaraya and Watson's (1964) with an exponential kernel over the distance in tokens,
within a run, and a prior of no drift; Huber's (1964) weights bound what one token can do, because
those that attend to a run's first tokens drift many times as far as others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rakv_cluster.kv.buffer import KvBuffer, Positions, no_positions
from rakv_cluster.kv.rotary import KeyRotation, turn

REACH_TOKENS = 32.0
"""Distance at which a token's drift counts e times less than next to it."""

PRIOR_WEIGHT = 1.0
"""Weight of no drift at all: as much as one repaired token right beside."""

CLIP = 0.75
"""A drift longer than so many times the median of its head counts as one of that length: most are
shortened, and what counts is above all where they point."""

_PIECE_TOKENS = 256
"""Positions that one product serves, at most, from what is repaired of their run among them and
as far from them: the weights of the rest are below e to the minus 6th."""

_NOT_REUSED = -1


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """What is reused of a prompt, and what is computed, to tell which of it is repaired.

    ``runs`` int64 ``[positions]`` is the number of the run that each position belongs to: KV that
    was computed in one piece and is moved by one distance; negative where nothing is reused, and
    may end behind the last that is. ``computed`` are the positions that steps will compute,
    ascending, repaired ones among them. Without computed positions there is nothing to follow.
    """

    rotation: KeyRotation
    runs: Positions = field(default_factory=no_positions)
    computed: Positions = field(default_factory=no_positions)

    def between(self, first: int, last: int) -> Between:
        """What follows the repair of the computed positions from ``first`` to ``last``: those up to
        the next one, and in front of the first."""
        start, stop = np.searchsorted(self.computed, [first, last + 1])
        low = int(self.computed[start]) if start else 0
        high = int(self.computed[stop]) if stop < len(self.computed) else len(self.runs)
        high = min(high, len(self.runs))
        rows = self.computed[start:stop]
        rows = rows[rows < len(self.runs)]
        repaired = rows[self.runs[rows] > _NOT_REUSED]
        kept = self.runs[low:high] > _NOT_REUSED
        kept[rows - low] = False
        return Between(low, high, repaired, np.flatnonzero(kept) + low)


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """Of positions ``[low, high)``, those that are ``repaired`` and those that are ``kept``."""

    low: int
    high: int
    repaired: Positions
    kept: Positions


NO_DRIFT = Drift(KeyRotation.refused("nothing is reused"))
"""Nothing follows anything."""


class Follower(Protocol):
    """The kept positions that follow rows of one step (or a part of it), in every layer.

    To be made before any of the rows' K/V are stored, which it compares with what was there.
    """

    def follow(self, layer: int) -> None:
        """Once the rows' K/V of ``layer`` are stored, and before anything attends there."""
        ...


MakeFollower = Callable[[Drift, Between, KvBuffer], Follower]


def clipped(drift: torch.Tensor) -> torch.Tensor:
    """``[..., tokens, head_dim]``, no token's longer than :data:`CLIP` times the median's."""
    length = drift.norm(dim=-1, keepdim=True)
    bound = CLIP * length.median(dim=-2, keepdim=True).values
    shortened: torch.Tensor = drift * (bound / length.clamp_min(1e-20)).clamp_max_(1.0)
    return shortened


class Turns:
    """Rotations by the angles of given positions, of layers that may have different ones."""

    def __init__(self, rotation: KeyRotation, positions: Positions, device: torch.device) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        made: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}
        at = torch.from_numpy(positions).double()
        for frequencies in rotation.frequencies:
            key = frequencies.numpy().tobytes()
            if key not in made:
                angles = at[:, None] * frequencies
                made[key] = (angles.cos().float().to(device), angles.sin().float().to(device))
            self._layers.append(made[key])

    def tables(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 ``[positions, half]``."""
        return self._layers[layer]

    def turn(
        self, layer: int, keys: torch.Tensor, part: slice = slice(None), *, back: bool = False
    ) -> None:
        """Turn ``keys`` ``[kv_heads, positions, head_dim]`` from position 0 to those of the
        positions that ``part`` says, or ``back``; in place."""
        cos, sin = (table[part] for table in self._layers[layer])
        turn(keys, cos, -sin if back else sin)


class ProductFollower:
    """On any device: a product for every piece of a run. See :class:`Follower`."""

    def __init__(self, drift: Drift, between: Between, buffer: KvBuffer) -> None:
        device = buffer.data.device
        self._buffer = buffer
        self._at = torch.from_numpy(between.repaired).to(device)
        self._before = buffer.data.index_select(3, self._at)
        self._back = Turns(drift.rotation, between.repaired, device)
        self._forth = Turns(drift.rotation, np.arange(between.low, between.high), device)
        self._low = between.low
        self._pieces = [
            (piece, torch.from_numpy(weights).float().to(device))
            for piece in _pieces(drift.runs, between)
            if (weights := _weights(piece, between)).any()
        ]

    def follow(self, layer: int) -> None:
        """See :meth:`Follower.follow`."""
        slots = self._buffer.data[layer]
        drift = slots.index_select(2, self._at).float() - self._before[layer].float()
        self._back.turn(layer, drift[0], back=True)
        drift = clipped(drift)
        for piece, weights in self._pieces:
            moved = weights @ drift[:, :, piece.repaired]
            here = slice(piece.start - self._low, piece.stop - self._low)
            self._forth.turn(layer, moved[0], here)
            slots[:, :, piece.start : piece.stop] += moved


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions ``[start, stop)`` of one run, and which of the repaired ones they follow."""

    start: int
    stop: int
    repaired: slice


def _pieces(runs: Positions, between: Between) -> list[_Piece]:
    mine = runs[between.low : between.high]
    borders = np.flatnonzero(np.diff(mine)) + 1
    pieces = []
    for first, end in zip([0, *borders], [*borders, len(mine)], strict=True):
        if mine[first] == _NOT_REUSED:
            continue
        cuts = np.linspace(first, end, -(-(end - first) // _PIECE_TOKENS) + 1).astype(int)
        cuts += between.low
        for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            near = max(start - _PIECE_TOKENS, cuts[0]), min(stop + _PIECE_TOKENS, cuts[-1])
            some = slice(*np.searchsorted(between.repaired, near).tolist())
            pieces.append(_Piece(start, stop, some))
    return pieces


def _weights(piece: _Piece, between: Between) -> npt.NDArray[np.float64]:
    """``[positions, repaired]``: each row's sum is below 1, the rest is the prior's. Zero where
    nothing follows."""
    positions = np.arange(piece.start, piece.stop)[:, None]
    weights = np.exp(-np.abs(positions - between.repaired[piece.repaired]) / REACH_TOKENS)
    weights /= weights.sum(1, keepdims=True) + PRIOR_WEIGHT
    share: npt.NDArray[np.float64] = weights * np.isin(positions, between.kept)
    return share
