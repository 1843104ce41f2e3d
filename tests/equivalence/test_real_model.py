"""The default model: our greedy loop against transformers' generate, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.fetch import is_fetched, model_folder
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.model.step import Span, Step
from rakv_cluster.types import SamplingParams

pytestmark = pytest.mark.model

NEW_TOKENS = 24
PROMPTS = (
    "The Gotthard tunnel is 57 km long. It was opened in",
    "def fibonacci(n):\n    ",
    "In 1969,  12 people and 3.5 tons of",
)


@pytest.fixture(scope="module")
def stock(default_model_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(default_model_path, dtype=torch.float32)


def generated(stock: PreTrainedModel, prompt_ids: list[int]) -> list[int]:
    """What transformers' own greedy search adds to the prompt."""
    out = stock.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids)),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    ids: list[int] = out[0, len(prompt_ids) :].tolist()
    return ids


def greedy(loaded: LoadedModel, prompt_ids: list[int], *, piece: int) -> list[int]:
    """Prefill in pieces of ``piece`` tokens, then one-token steps."""
    layout = loaded.card.layout
    buffer = KvBuffer(torch.zeros(layout.shape(len(prompt_ids) + NEW_TOKENS)))
    rule = TokenRule(SamplingParams(), prompt_ids, loaded.card.vocab_size)
    ids, out, start = list(prompt_ids), [], 0
    while len(out) < NEW_TOKENS:
        stop = min(len(ids), start + piece)
        positions = torch.arange(start, stop)
        span = Span(buffer, 0, stop - start, start, stop - 1)
        rows = torch.tensor([stop - start - 1])
        logits = loaded.runner.forward(
            Step(torch.tensor(ids[start:stop]), positions, (span,), rows)
        )
        start = stop
        if stop == len(ids):
            (choice,) = choose(logits, [RuleRow(rule, position=stop)])
            ids.append(choice.token_id)
            out.append(choice.token_id)
    return out


@pytest.mark.parametrize("piece", [5, 512])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_generate(
    default_model: LoadedModel, stock: PreTrainedModel, prompt: str, piece: int
) -> None:
    prompt_ids = default_model.tokenizer(prompt).input_ids
    expected = generated(stock, prompt_ids)

    assert greedy(default_model, prompt_ids, piece=piece) == expected


def test_gemma3_greedy_equals_generate_beyond_its_window(cache_dir: Path) -> None:
    """Two RoPE bases, windows of 512 in 15 of 18 layers, a prompt of 700 tokens."""
    if not is_fetched("gemma3-270m", cache_dir):
        pytest.skip("gemma3-270m is not in the cache: `rakv model fetch gemma3-270m`")
    folder = model_folder("gemma3-270m", cache_dir)
    loaded = load_model(str(folder))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lines = "".join(f"Line {i}: {i * i} apples and {i % 7} pears. " for i in range(60))
    prompt_ids = loaded.tokenizer(lines).input_ids[:700]
    assert len(prompt_ids) == 700

    assert greedy(loaded, prompt_ids, piece=256) == generated(stock, prompt_ids)


def test_card(default_model: LoadedModel) -> None:
    card = default_model.card
    assert (card.context_tokens, card.vocab_size) == (8192, 49152)
    assert (card.layout.layers, card.layout.kv_heads, card.layout.head_dim) == (30, 3, 64)
    assert card.eos_token_ids == {2}
    assert 0 < card.self_check_error < 1e-3


def test_tokenizer_is_the_original_one(default_model: LoadedModel) -> None:
    """Ids from the published SmolLM2 tokenizer; the GGUF reader alone gets "x  2" wrong."""
    tokenizer = default_model.tokenizer
    assert tokenizer("Hello world").input_ids == [19556, 905]
    assert tokenizer("x  2").tokens() == ["x", "ĠĠ", "2"]
    assert tokenizer("3.14").tokens() == ["3", ".", "1", "4"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
