"""The one rule that decides every token: token = f(logits, request, seed, position).

In this order: repetition penalty, presence and frequency penalties, logit bias, bans. Greedy
(``temperature == 0``) takes the highest score. Sampling divides by the temperature, cuts by
top-k, then top-p of what is left, then min-p, and takes the highest ``score + Gumbel noise`` of
the survivors: that draws from their softmax (Gumbel-max; Maddison et al., "A* sampling", 2014)
while the draw stays a function of its arguments. The lowest id wins equal scores; a cut never
separates equal scores. Nothing here depends on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.model.cuts import thresholds
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
        return any(part is not None for part in (self._counts, self._seen, self._bias))

    def accept(self, token_id: int) -> None:
        """Count a token that was emitted, or forced as already emitted."""
        if self._counts is not None:
            self._counts[token_id] += 1.0
        if self._seen is not None:
            self._seen[token_id] = True

    def adjust(self, row: torch.Tensor, pending: Sequence[int]) -> None:
        """Apply penalties and bias in place to one row ``[V]``, as if ``pending`` were accepted."""
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

    ``margin`` is the winner's final score minus the runner-up's (perturbed by the noise when
    sampling; infinite if one token survived): below the rounding error of the logits, divided by
    the temperature, another numeric class may choose otherwise. ``logprob`` and ``top`` (likeliest
    first) are natural logs under the model's own distribution, before penalties, bias and
    temperature; None and empty unless asked for.
    """

    token_id: int
    margin: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def choose(logits: torch.Tensor, rows: Sequence[RuleRow]) -> list[Choice]:
    """Decide one token per row of ``logits``, float32 ``[R, V]``, which stays as it is.

    Raises ``ValueError`` where a row has no finite highest score (NaN logits, everything banned).
    """
    scores = _adjusted(logits, rows)
    picks: dict[int, tuple[int, float]] = {}
    greedy = [index for index, row in enumerate(rows) if row.rule.greedy]
    sampled = [index for index, row in enumerate(rows) if not row.rule.greedy]
    if greedy:
        picks.update(zip(greedy, _winners(_rows(scores, greedy)), strict=True))
    if sampled:
        perturbed = _perturbed(_rows(scores, sampled), [rows[index] for index in sampled])
        picks.update(zip(sampled, _winners(perturbed), strict=True))
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


def _winners(scores: torch.Tensor) -> list[tuple[int, float]]:
    """Per row: the highest score's token (lowest id on ties) and its lead over the next."""
    best = scores.argmax(dim=-1, keepdim=True)
    highest = scores.gather(-1, best)
    runner_up = scores.scatter(-1, best, -math.inf).amax(dim=-1, keepdim=True)
    if not bool(highest.isfinite().all()):
        bad = (~highest.isfinite()).flatten().nonzero().flatten().tolist()
        raise ValueError(f"no finite highest score in rows {bad}")
    margins = (highest - runner_up).flatten().tolist()
    return list(zip(best.flatten().tolist(), margins, strict=True))


def _perturbed(scores: torch.Tensor, rows: Sequence[RuleRow]) -> torch.Tensor:
    """``score / temperature + noise`` of the tokens that survive the cuts, others -inf: float64."""
    device = scores.device
    params = [row.rule.params for row in rows]
    temperatures = [max(item.temperature, _MIN_TEMPERATURE) for item in params]
    scaled = scores - scores.amax(dim=-1, keepdim=True)
    scaled /= torch.tensor(temperatures, device=device)[:, None]
    keys = torch.tensor(
        [
            row_key(item.seed, item.choice_index, row.position)
            for item, row in zip(params, rows, strict=True)
        ],
        device=device,
    )
    if not any(item.top_k or item.top_p < 1.0 or item.min_p for item in params):
        return scaled + gumbel(keys[:, None], torch.arange(scaled.shape[-1], device=device))
    keep = (scaled > -math.inf) & (scaled >= thresholds(scaled, params)[:, None])
    row_of, token_of = keep.nonzero(as_tuple=True)
    noise = gumbel(keys[row_of], token_of)
    perturbed = torch.full_like(scaled, -math.inf, dtype=torch.float64)
    perturbed[row_of, token_of] = scaled[row_of, token_of] + noise
    return perturbed


def _logprobs(
    logits: torch.Tensor, rows: Sequence[RuleRow], picks: dict[int, tuple[int, float]]
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
