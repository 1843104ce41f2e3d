"""What a watch sees of attention, against the weights that the stock model gives away."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.model.watch import AttentionWatch
from rakv_cluster.testing.runners import RUNNER_CASES, fused_runner, generic_runner
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_gemma3, tiny_llama

LENGTH, FIRST = 40, 20
LAYERS = (0, 1)


CASES = {**RUNNER_CASES, "gemma3": (lambda: tiny_gemma3(window=16), generic_runner)}


def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(3))


def stock_attention(model: PreTrainedModel) -> torch.Tensor:
    """Largest over heads, the mean over rows from ``FIRST`` on and ``LAYERS``: ``[LENGTH]``."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=ids()[None], output_attentions=True)
    seen = [out.attentions[layer][0].amax(0)[FIRST:].mean(0) for layer in LAYERS]
    return torch.stack(seen).mean(0)


def run(runner: Runner, buffer: KvBuffer, positions: torch.Tensor, watch: AttentionWatch) -> None:
    span = Span(buffer, 0, len(positions), int(positions[0]), int(positions[-1]), watch)
    runner.forward(Step(ids()[positions], positions, (span,), torch.tensor([], dtype=torch.int64)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", [LENGTH, FIRST, 35], ids=["whole", "before", "inside"])
def test_a_watch_sees_what_the_model_attends_to(name: str, split: int) -> None:
    build, runner_of = CASES[name]
    expected = stock_attention(build())
    runner = runner_of(build())
    buffer = KvBuffer(torch.zeros(runner.layout.shape(64)))
    watch = AttentionWatch(LAYERS, FIRST)

    for start, stop in ((0, split), (split, LENGTH)):
        if start < stop:
            run(runner, buffer, torch.arange(start, stop), watch)

    torch.testing.assert_close(watch.figures(LENGTH), expected, atol=1e-5, rtol=1e-4)


def test_rows_of_others_are_not_seen() -> None:
    """Two spans in one step, cut into blocks elsewhere: each watch has its own rows alone."""
    runner = fused_runner(tiny_llama())
    alone, beside = (AttentionWatch(LAYERS, FIRST) for _ in range(2))
    run(runner, KvBuffer(torch.zeros(runner.layout.shape(64))), torch.arange(LENGTH), alone)
    buffers = [KvBuffer(torch.zeros(runner.layout.shape(640))) for _ in range(2)]
    other = torch.randint(3, VOCAB_SIZE, (500,), generator=torch.Generator().manual_seed(4))
    spans = (
        Span(buffers[0], 0, 500, 0, 499),
        Span(buffers[1], 500, 500 + LENGTH, 0, LENGTH - 1, beside),
    )
    positions = torch.cat([torch.arange(500), torch.arange(LENGTH)])
    wanted = torch.tensor([], dtype=torch.int64)

    runner.forward(Step(torch.cat([other, ids()]), positions, spans, wanted))

    torch.testing.assert_close(beside.figures(LENGTH), alone.figures(LENGTH), atol=1e-5, rtol=1e-4)


def test_nothing_seen_is_zero() -> None:
    assert not AttentionWatch(LAYERS).figures(5).any()
