"""What is no near-tie is decided alike however the logits are off within eps."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.types import SamplingParams

VOCAB = 24
WAYS = 12

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB]),
    top_p=st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)


@given(params, st.integers(0, 2**32), st.sampled_from([0.02, 0.1, 0.5]))
def test_other_rounding_changes_no_token_but_near_ties(
    sampling: SamplingParams, seed: int, eps: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, VOCAB, generator=generator) * 2
    # Any two logits of a row are off against each other by at most eps.
    off = (torch.rand(WAYS, VOCAB, generator=generator) - 0.5) * eps * 0.999
    row = RuleRow(TokenRule(sampling, (), VOCAB), 3)

    (choice,) = choose(logits, [row], eps=eps)
    others = choose(logits + off, [row] * WAYS)

    if not choice.near_tie:
        assert {other.token_id for other in others} == {choice.token_id}


def test_most_tokens_are_no_near_ties() -> None:
    """Else the property above would hold for a rule that always doubts."""
    logits = torch.randn(400, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_k=8, top_p=0.9)):
        rows = [RuleRow(TokenRule(sampling, (), VOCAB), position) for position in range(400)]
        near = sum(choice.near_tie for choice in choose(logits, rows, eps=1e-3))
        assert near < 20
