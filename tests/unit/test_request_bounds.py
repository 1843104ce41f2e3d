"""Numbers at the edges of what a request may say: refused by name, or harmless to an engine."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.config import load_settings
from rakv_cluster.errors import ContextLengthExceeded, InvalidRequest
from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.serving.openai_models import ChatRequest, CompletionRequest, parse
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.service import Service
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import CARD, ScriptedBackend
from rakv_cluster.testing.tiny_models import tiny_tokenizer
from rakv_cluster.types import SamplingParams

LARGEST_LOGIT = 1e4
NUMBERS = (
    "0",
    "5e-324",
    "1e-40",
    "1e-6",
    "0.1",
    "0.5",
    "1",
    "1.9",
    "2",
    "10",
    "1e30",
    "1" + "0" * 400,
)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k", "repetition_penalty"])
def test_every_number_is_refused_by_name_or_gives_a_token(field: str, number: str) -> None:
    try:
        request = parse(CompletionRequest, f'{{"prompt": "x", "{field}": {number}}}'.encode())
    except InvalidRequest as error:
        outcome = error.field
    else:
        outcome = field if gives_a_token(request) else "no token"

    assert outcome == field


def gives_a_token(request: CompletionRequest) -> bool:
    """Whether the token rule finds one among widely spread logits, all tokens seen before."""
    params = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        min_p=request.min_p,
        top_k=request.top_k,
        repetition_penalty=request.repetition_penalty,
    )
    logits = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, CARD.vocab_size)[None]
    rule = TokenRule(params, range(CARD.vocab_size), CARD.vocab_size)
    (choice,) = choose(logits, [RuleRow(rule, position=1)])
    return 0 <= choice.token_id < CARD.vocab_size


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_output_limit_beyond_the_context_is_refused_by_its_own_name(field: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], field: CARD.context_tokens}

    with pytest.raises(ContextLengthExceeded) as refusal:
        await service().prepare(parse(ChatRequest, json.dumps(body).encode()))

    assert refusal.value.field == field
    assert f"{field} is {CARD.context_tokens}" in refusal.value.message


@pytest.mark.parametrize("field", ["max_kl", "recompute"])
async def test_what_only_blending_heeds_is_refused_where_nothing_blends(field: str) -> None:
    request = parse(CompletionRequest, json.dumps({"prompt": "x", field: 0.5}).encode())

    assert await service(default_reuse="blend").prepare(request)
    with pytest.raises(InvalidRequest) as refusal:
        await service().prepare(request)

    assert refusal.value.field == field


def service(**settings: object) -> Service:
    tokenizer = tiny_tokenizer()
    return Service(
        settings=load_settings(settings, environ={}),
        backend=ScriptedBackend(),
        card=CARD,
        renderer=PromptRenderer(tokenizer),
        cuts=CutTable.from_tokenizer(tokenizer),
        clock=ManualClock(),
        seeds=Random(0),
    )
