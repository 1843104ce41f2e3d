"""Weights in four bits: what the product is, and what cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.four_bit import FourBitLinear, four_bit_runner
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import Kernel, Linear
from rakv_cluster.model.llama import llama_weights
from rakv_cluster.model.loader import load_model
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_gemma3, tiny_llama


def linear(outputs: int, inputs: int, *, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    return Linear(weight, torch.randn(outputs, generator=generator) if bias else None)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 64, False), (259, 96, True)])
def test_a_product_is_near_the_full_one(outputs: int, inputs: int, bias: bool, rows: int) -> None:
    full = linear(outputs, inputs, bias=bias)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))

    small = FourBitLinear.of(full)

    expected, found = full.apply(x, Kernel.PLAIN), small.apply(x, Kernel.PLAIN)
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    # Sixteen levels over the range of 32 normal numbers.
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert small.outputs == outputs
    assert small.nbytes < full.nbytes / 5


def test_weights_that_need_but_sixteen_levels_come_back_whole() -> None:
    levels = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(2))
    levels[:, 0], levels[:, 1], levels[:, 32], levels[:, 33] = 0, 15, 0, 15
    full = Linear((levels - 8) * 0.25)
    x = torch.randint(-4, 5, (2, 64), generator=torch.Generator().manual_seed(3)).float()

    small = FourBitLinear.of(full)

    # Every number on the way is a small integer times a power of two; the result is bfloat16.
    expected = full.apply(x, Kernel.PLAIN).to(torch.bfloat16).float()
    assert torch.equal(small.apply(x, Kernel.PLAIN), expected)


def test_a_runner_in_four_bits_shares_the_target_s_kv() -> None:
    target = FusedLlamaRunner(llama_weights(tiny_llama()))
    small = four_bit_runner(target)
    ids = torch.arange(40) * 5 % 250
    buffer = KvBuffer(torch.zeros(target.layout.shape(64)))
    forward(target, buffer, ids[:30], 0)
    before = buffer.data.clone()

    guessed = forward(small, buffer, ids[30:31], 30)

    assert small.vocab_size == target.vocab_size == guessed.shape[1]
    assert torch.equal(buffer.data[..., :30, :], before[..., :30, :])
    exact = forward(target, buffer, ids[30:31], 30)
    assert torch.corrcoef(torch.cat([guessed, exact]))[0, 1] > 0.9


def forward(runner: Runner, buffer: KvBuffer, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Logits of the last of ``ids``."""
    rows = len(ids)
    span = Span(buffer, 0, rows, first, first + rows - 1)
    return runner.forward(
        Step(ids, torch.arange(first, first + rows), (span,), torch.tensor([rows - 1]))
    )


def test_what_cannot_be_had_in_four_bits_is_refused(tmp_path: Path) -> None:
    gemma = load_model(str(save_tiny_model(tmp_path / "gemma", tiny_gemma3())), threads=1)
    half = FusedLlamaRunner(llama_weights(tiny_llama().half()))

    with pytest.raises(UnsupportedModel, match="fused decoder"):
        four_bit_runner(gemma.runner)
    with pytest.raises(UnsupportedModel, match="bfloat16"):
        four_bit_runner(half)
    with pytest.raises(UnsupportedModel, match="groups of 32, not 48 inputs"):
        FourBitLinear.of(linear(16, 48))
