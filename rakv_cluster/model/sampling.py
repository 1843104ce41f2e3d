"""The one rule that decides every token: token = f(logits, request, seed, position).

In this order: repetition penalty, presence and frequency penalties, logit bias, grammar, bans.
Greedy
(``temperature == 0``) takes the highest score. Sampling divides by the temperature, cuts by
top-k, then top-p of what is left, then min-p, and takes the highest ``score + Gumbel noise`` of
the survivors: that draws from their softmax (Gumbel-max; Maddison et al., "A* sampling", 2014)
while the draw stays a function of its arguments. The lowest id wins equal scores; a cut never
separates equal scores. Nothing here depends on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.model.cuts import survivors
from rakv_cluster.model.grammar import TokenMask
from rakv_cluster.model.noise import gumbel, row_key
from rakv_cluster.types import SamplingParams

# Below this a temperature acts as this: scores stay finite, and the highest wins in effect.
_MIN_TEMPERATURE = 1e-6

_CPU = torch.device("cpu")


class TokenRule:
    """One sequence's sampling parameters and the tokens that its penalties have seen.

    Presence and frequency penalties count generated tokens, as OpenAI's do; the repetition
    penalty sees the prompt too, as in transformers. State lives on ``device``, where the logits
    will be, and takes memory only for the penalties in use. Raises :class:`InvalidRequest` for a
    biased id outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device = _CPU,
    ) -> None:
        self.params = params
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._mask: TokenMask | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, device=device)
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        if params.logit_bias:
            ids, values = zip(*sorted(params.logit_bias.items()), strict=True)
            if not 0 <= ids[0] <= ids[-1] < vocab_size:
                raise InvalidRequest(
                    f"logit_bias ids must be in 0..{vocab_size - 1}", field="logit_bias"
                )
            self._bias = (torch.tensor(ids, device=device), torch.tensor(values, device=device))

    @property
    def greedy(self) -> bool:
        """Whether the highest score wins without noise."""
        return self.params.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether scores can differ from logits."""
        parts = (self._counts, self._seen, self._bias, self._mask)
        return any(part is not None for part in parts)

    def restrict(self, mask: TokenMask) -> None:
        """Let no token through that ``mask`` forbids; what was emitted before, it has accepted."""
        self._mask = mask

    def accept(self, token_id: int) -> None:
        """Count a token that was emitted, or forced as already emitted."""
        if self._counts is not None:
            self._counts[token_id] += 1.0
        if self._seen is not None:
            self._seen[token_id] = True
        if self._mask is not None:
            self._mask.accept(token_id)

    def check_end(self) -> None:
        """Raise ``ValueError`` if the text ends where its grammar had nothing to allow: the end is
        what is left then."""
        if self._mask is not None:
            self._mask.check()

    def adjust(self, row: torch.Tensor, pending: Sequence[int]) -> None:
        """Apply penalties, bias and grammar in place to one row ``[V]``, as if ``pending`` were
        accepted."""
        ahead = torch.tensor(pending, dtype=torch.int64, device=row.device)
        if self._seen is not None:
            seen = self._seen.index_fill(0, ahead, True)
            penalty = self.params.repetition_penalty
            lowered = torch.where(row > 0, row / penalty, row * penalty)
            row.copy_(torch.where(seen, lowered, row))
        if self._counts is not None:
            counts = self._counts.index_add(0, ahead, torch.ones_like(ahead, dtype=torch.float32))
            row.sub_(counts, alpha=self.params.frequency_penalty)
            row.sub_((counts > 0).to(row.dtype), alpha=self.params.presence_penalty)
        if self._bias is not None:
            row.index_add_(0, *self._bias)
        if self._mask is not None:
            self._mask.forbid(row, pending)


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One row of logits and the rule that decides it.

    ``position`` is the one that the chosen token will take. ``pending`` are draft tokens in front
    of this row that are not accepted yet: they count as if they were. ``banned`` ids cannot be
    chosen (stop ids below ``min_tokens``). ``top_logprobs`` < 0: no log-probabilities.
    """

    rule: TokenRule
    position: int
    pending: tuple[int, ...] = ()
    banned: frozenset[int] = frozenset()
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of one row.

    ``near_tie``: had the logits been off by the rounding error that :func:`choose` was told of,
    another token might have won. ``logprob`` and ``top`` (likeliest first) are natural logs under
    the model's own distribution, before penalties, bias and temperature; None and empty unless
    asked for.
    """

    token_id: int
    near_tie: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


_Pick: TypeAlias = tuple[int, bool]
"""A token and whether it was a near-tie."""


@torch.inference_mode()
def choose(logits: torch.Tensor, rows: Sequence[RuleRow], *, eps: float = 0.0) -> list[Choice]:
    """Decide one token per row of ``logits``, float32 ``[R, V]``, which stays as it is.

    ``eps`` is how far two logits of a row may be off against each other (see
    :class:`~rakv_cluster.model.numerics.Numerics`); 0 looks for no near-ties. Raises
    ``ValueError`` where a row has no finite highest score (NaN logits, everything banned).
    """
    scores = _adjusted(logits, rows)
    picks: dict[int, _Pick] = {}
    greedy = [index for index, row in enumerate(rows) if row.rule.greedy]
    sampled = [index for index, row in enumerate(rows) if not row.rule.greedy]
    if greedy:
        picks.update(zip(greedy, _highest(_rows(scores, greedy), eps), strict=True))
    if sampled:
        drawn = _drawn(_rows(scores, sampled), [rows[index] for index in sampled], eps)
        picks.update(zip(sampled, drawn, strict=True))
    logprobs = _logprobs(logits, rows, picks)
    return [Choice(*picks[index], *logprobs.get(index, (None, ()))) for index in range(len(rows))]


def _rows(scores: torch.Tensor, indices: list[int]) -> torch.Tensor:
    return scores if len(indices) == scores.shape[0] else scores[indices]


def _adjusted(logits: torch.Tensor, rows: Sequence[RuleRow]) -> torch.Tensor:
    """Scores after penalties, bias and bans; ``logits`` itself where no row has any."""
    touched = [i for i, row in enumerate(rows) if row.rule.adjusts or row.banned]
    if not touched:
        return logits
    scores = logits.clone()
    for index in touched:
        row = rows[index]
        row.rule.adjust(scores[index], row.pending)
        if row.banned:
            scores[index, sorted(row.banned)] = -math.inf
    return scores


def _highest(scores: torch.Tensor, eps: float) -> list[_Pick]:
    """Per row the highest score's token, the lowest id on ties."""
    best = _winners(scores)
    near = torch.zeros(len(scores), dtype=torch.bool)
    if eps:
        near = _lead(scores, best) < eps
    return list(zip(best.flatten().tolist(), near.tolist(), strict=True))


def _winners(scores: torch.Tensor) -> torch.Tensor:
    """Index of each row's highest score, the lowest on ties, int64 ``[R, 1]``."""
    best = scores.argmax(dim=-1, keepdim=True)
    highest = scores.gather(-1, best).flatten().tolist()
    bad = [row for row, score in enumerate(highest) if not math.isfinite(score)]
    if bad:
        raise ValueError(f"no finite highest score in rows {bad}")
    return best


def _lead(scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """How far the scores at ``best`` ``[R, 1]`` are above the highest of the others, ``[R]``."""
    others = scores.scatter(-1, best, -math.inf).amax(dim=-1)
    return scores.gather(-1, best)[:, 0] - others


def _drawn(scores: torch.Tensor, rows: Sequence[RuleRow], eps: float) -> list[_Pick]:
    """Per row the highest ``score / temperature + noise`` among what survives the cuts."""
    device = scores.device
    params = [row.rule.params for row in rows]
    temperatures = torch.tensor(
        [max(item.temperature, _MIN_TEMPERATURE) for item in params], device=device
    )
    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    keys = torch.tensor(
        [
            row_key(item.seed, item.choice_index, row.position)
            for item, row in zip(params, rows, strict=True)
        ],
        device=device,
    )
    doubt = eps / temperatures
    if not any(item.top_k or item.top_p < 1.0 or item.min_p for item in params):
        noise = gumbel(keys[:, None], torch.arange(scaled.shape[-1], device=device))
        perturbed = scaled + noise
        best = _winners(perturbed)
        near = _lead(perturbed, best) < doubt if eps else torch.zeros(len(rows), dtype=torch.bool)
        return list(zip(best.flatten().tolist(), near.tolist(), strict=True))
    alive = survivors(scaled, params, doubt if eps else None)
    perturbed = _perturbed(scaled, keys, alive.possible)
    best = _winners(perturbed.masked_fill(~alive.kept, -math.inf) if eps else perturbed)
    near = torch.zeros(len(rows), dtype=torch.bool)
    if eps:
        unsure = ~alive.certain.gather(-1, best)[:, 0]
        near = unsure | (_lead(perturbed, best) < doubt)
    return list(zip(best.flatten().tolist(), near.tolist(), strict=True))


def _perturbed(scaled: torch.Tensor, keys: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Scores with noise where ``alive``, -inf elsewhere: float64 ``[R, V]``."""
    row_of, token_of = alive.nonzero(as_tuple=True)
    perturbed = torch.full_like(scaled, -math.inf, dtype=torch.float64)
    perturbed[row_of, token_of] = scaled[row_of, token_of] + gumbel(keys[row_of], token_of)
    return perturbed


def _logprobs(
    logits: torch.Tensor, rows: Sequence[RuleRow], picks: Mapping[int, _Pick]
) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """Log-probability and likeliest alternatives for the rows that want them."""
    wanted = [index for index, row in enumerate(rows) if row.top_logprobs >= 0]
    if not wanted:
        return {}
    table = logits[wanted].log_softmax(dim=-1)
    found = {}
    for logprobs, index in zip(table, wanted, strict=True):
        top = logprobs.topk(min(rows[index].top_logprobs, logprobs.shape[0]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        found[index] = (float(logprobs[picks[index][0]]), tuple(pairs))
    return found
