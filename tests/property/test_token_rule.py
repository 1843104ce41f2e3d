"""A row's token is a function of its own arguments: batch, order and device path do not matter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster.model.noise import gumbel, row_key
from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.types import SamplingParams

VOCAB = 700  # more than the candidates that a cut is first looked for among

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 7, 600, VOCAB, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.0, 5.0]), max_size=2),
    choice_index=st.integers(0, 3),
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def rule_rows(draw: st.DrawFn) -> RuleRow:
    rule = TokenRule(draw(params), draw(tokens), VOCAB)
    for token in draw(tokens):
        rule.accept(token)
    return RuleRow(
        rule,
        position=draw(st.integers(0, 10_000)),
        pending=tuple(draw(tokens)),
        banned=frozenset(draw(tokens)),
        top_logprobs=draw(st.sampled_from([-1, 0, 4])),
    )


def logits_for(rows: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(rule_rows(), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_batch_composition_never_matters(rows: list[RuleRow], seed: int) -> None:
    logits = logits_for(len(rows), seed)
    alone = [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert choose(logits, rows) == alone
    assert choose(logits.flip(0), rows[::-1]) == alone[::-1]


@settings(max_examples=100, deadline=None)
@given(row=rule_rows(), seed=st.integers(0, 1000))
def test_equals_the_rule_written_plainly(row: RuleRow, seed: int) -> None:
    logits = logits_for(1, seed)
    scores = logits[0].clone()
    row.rule.adjust(scores, row.pending)
    scores[list(row.banned)] = -torch.inf
    assert choose(logits, [row])[0].token_id == plain_rule(scores, row)


def plain_rule(scores: torch.Tensor, row: RuleRow) -> int:
    """Sort everything, drop what is cut, add the noise, take the highest."""
    item = row.rule.params
    if item.temperature == 0.0:
        return int(scores.argmax())
    ranked = ((scores - scores.max()) / item.temperature).sort(descending=True, stable=True)
    kept = ranked.values[: item.top_k or VOCAB].double()
    if item.top_p < 1.0:
        kept = kept[: int((kept.softmax(-1).cumsum(-1) < item.top_p).sum()) + 1]
    if item.min_p > 0.0:
        kept = kept[kept.exp() >= item.min_p]
    token_ids = ranked.indices[: len(kept)]
    noise = gumbel(torch.tensor(row_key(item.seed, item.choice_index, row.position)), token_ids)
    return int(token_ids[(kept + noise).argmax()])
