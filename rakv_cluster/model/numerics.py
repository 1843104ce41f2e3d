"""How far a runner's logits depend on the way in which a sequence is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.step import Runner, Span, Step

_TOKENS = 150
# Long pieces, single rows and verify-like steps, some of them across position 64 and 128.
_CUTS = (0, 37, 38, 43, 59, 61, 62, 63, 64, 65, 74, 121, 126, 131, 148, 149, _TOKENS)
_BUFFER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Numerics:
    """Largest difference between logits of one position over all ways to compute it.

    Ways tried: one pass; pieces of 1 to 47 rows; pieces beside another sequence's. 0 means that
    all of them agreed bit for bit.
    """

    spread: float

    @property
    def bitwise(self) -> bool:
        """Whether packing, splitting and reuse leave every bit as it is."""
        return self.spread == 0

    @property
    def near_tie_eps(self) -> float:
        """Two logits closer than this may change places from one way to another.

        Four times what was seen: a random sample underestimates the largest difference.
        """
        return 4 * self.spread


def observe_numerics(runner: Runner) -> Numerics:
    """Run one random sequence in several ways and compare its logits."""
    length = min(_TOKENS, runner.context_tokens)
    generator = torch.Generator().manual_seed(150)
    ids = torch.randint(0, runner.vocab_size, (length,), generator=generator)
    whole = _forward(runner, [(_buffer(runner), ids, 0)])
    cuts = [cut for cut in _CUTS if cut < length] + [length]
    alone, beside, other = _buffer(runner), _buffer(runner), _buffer(runner)
    spread = 0.0
    for start, stop in pairwise(cuts):
        piece = ids[start:stop]
        expected = whole[start:stop]
        pieces = _forward(runner, [(alone, piece, start)])
        mixed = _forward(runner, [(other, ids[: stop - start], 0), (beside, piece, start)])
        for logits in (pieces, mixed[stop - start :]):
            spread = max(spread, float((logits - expected).abs().max()))
    return Numerics(spread)


def _buffer(runner: Runner) -> KvBuffer:
    shape = runner.layout.shape(_BUFFER_TOKENS)
    return KvBuffer(torch.zeros(shape, dtype=runner.layout.torch_dtype, device=runner.device))


def _forward(runner: Runner, parts: Sequence[tuple[KvBuffer, torch.Tensor, int]]) -> torch.Tensor:
    """One step over (buffer, tokens, first position) parts; logits of all rows."""
    spans, positions, row = [], [], 0
    for buffer, ids, first in parts:
        last = first + len(ids) - 1
        spans.append(Span(buffer, row, row + len(ids), first, last))
        positions.append(torch.arange(first, last + 1))
        row += len(ids)
    ids = torch.cat([ids for _, ids, _ in parts])
    return runner.forward(Step(ids, torch.cat(positions), tuple(spans), torch.arange(row)))
