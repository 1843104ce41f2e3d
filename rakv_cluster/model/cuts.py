"""Top-k, top-p and min-p as one threshold per row, without sorting the vocabulary.

Top-k first, then top-p of the mass that top-k left, then min-p relative to the likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rakv_cluster.types import SamplingParams

# Highest scores that a top-k or top-p cut is first looked for among, since sorting a whole
# vocabulary takes milliseconds; a cut that is not there is looked for among 16 times as many.
_FIRST_CANDIDATES = 512
_MORE_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Survivors:
    """Which tokens survive the cuts, bool ``[R, V]``: as the scores are, and in doubt.

    ``certain`` ones survive, and none but ``possible`` ones do, also if every score were off by a
    little. Without doubt all three are one tensor.
    """

    certain: torch.Tensor
    kept: torch.Tensor
    possible: torch.Tensor


def survivors(
    scaled: torch.Tensor, params: Sequence[SamplingParams], doubt: torch.Tensor | None = None
) -> Survivors:
    """Survivors of each row's cuts; ``scaled`` as in :func:`thresholds`.

    ``doubt`` ``[R]`` is how far two scores of a row may be off against each other. A probability
    mass is then off by a factor of ``exp(doubt)``, whatever the scores are.
    """
    alive = scaled > -math.inf
    kept = alive & (scaled >= thresholds(scaled, params)[:, None])
    if doubt is None:
        return Survivors(kept, kept, kept)
    off = doubt.tolist()
    looser = [_with_doubt(item, -each) for item, each in zip(params, off, strict=True)]
    tighter = [_with_doubt(item, each) for item, each in zip(params, off, strict=True)]
    possible = alive & (scaled >= (thresholds(scaled, looser) - doubt)[:, None])
    inside = scaled >= thresholds(scaled, tighter)[:, None]
    # Surely inside is what is also clear of the first one outside, which could take its place.
    outside = scaled.masked_fill(inside, -math.inf).amax(dim=-1)
    certain = kept & inside & (scaled > (outside + doubt)[:, None])
    return Survivors(certain, kept, possible | kept)


def _with_doubt(params: SamplingParams, off: float) -> SamplingParams:
    """Cuts as they act if masses are off by ``exp(off)``: tighter above 0, looser below."""
    factor = math.exp(min(max(-off, -700.0), 700.0))
    return replace(
        params,
        top_p=min(params.top_p * factor, 1.0) if params.top_p < 1.0 else 1.0,
        min_p=min(params.min_p / factor, 1.0),
    )


def thresholds(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Lowest score that survives each row's cuts, float32 ``[R]``; -inf where there are none.

    ``scaled`` is float32 ``[R, V]``: scores over temperature, less each row's highest (which is
    therefore 0). All scores from the threshold on survive: equal scores share their fate.
    """
    vocab = scaled.shape[-1]
    lowest = torch.tensor(
        [math.log(item.min_p) if item.min_p > 0.0 else -math.inf for item in params],
        device=scaled.device,
    )
    ranked = [i for i, item in enumerate(params) if 0 < item.top_k < vocab or item.top_p < 1.0]
    if not ranked:
        return lowest
    counts = [params[i].top_k or vocab for i in ranked]
    masses = [params[i].top_p if params[i].top_p < 1.0 else math.inf for i in ranked]
    cut = _rank_thresholds(
        scaled[ranked],
        torch.tensor(counts, device=scaled.device).clamp_(max=vocab),
        torch.tensor(masses, device=scaled.device, dtype=torch.float64),
        candidates=min(_FIRST_CANDIDATES, vocab),
    )
    lowest[ranked] = torch.maximum(lowest[ranked], cut)
    return lowest


def _rank_thresholds(
    scaled: torch.Tensor, counts: torch.Tensor, masses: torch.Tensor, *, candidates: int
) -> torch.Tensor:
    """Score of the last token inside each row's top ``counts`` and, of these, top ``masses``.

    The mass is relative to the top ``counts``; the token that reaches it is inside. Rows whose
    cut lies beyond the ``candidates`` highest scores are done again with more of them.
    """
    vocab = scaled.shape[-1]
    values = scaled.topk(candidates, dim=-1).values
    inside = torch.arange(candidates, device=scaled.device) < counts[:, None]
    top = values.double().masked_fill(~inside, -math.inf)
    whole = torch.where(counts < vocab, top.logsumexp(-1), scaled.double().logsumexp(-1))
    mass = (top - whole[:, None]).exp().cumsum(-1)
    last = torch.minimum((mass < masses[:, None]).sum(-1), counts - 1)
    cut = values.gather(-1, last.clamp(max=candidates - 1)[:, None])[:, 0]
    beyond = (last >= candidates) | ((counts > candidates) & (counts < vocab))
    if candidates < vocab and bool(beyond.any()):
        more = min(candidates * _MORE_CANDIDATES, vocab)
        cut[beyond] = _rank_thresholds(
            scaled[beyond], counts[beyond], masses[beyond], candidates=more
        )
    return cut
