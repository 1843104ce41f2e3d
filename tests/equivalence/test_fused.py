"""The fused decoder against the stock transformers forward: any split, any packing, any kernel."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model import fused
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import PLAIN_ROWS, UNIFORM_ROWS, Kernel, RowChoice, RowPlan
from rakv_cluster.model.llama import LlamaWeights, llama_weights
from rakv_cluster.model.numerics import observe_numerics
from rakv_cluster.model.row_groups import sdpa_groups
from rakv_cluster.model.step import Span, Step

VOCAB = 211
LENGTH = 180
TOLERANCE = 2e-4

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "use_cache": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLANS = {
    "plain": PLAIN_ROWS,
    "uniform": UNIFORM_ROWS,
    "mixed": RowPlan((RowChoice(2, 2, Kernel.WEIGHT_FIRST), RowChoice(7, 8, Kernel.PLAIN)),
                     Kernel.PACKED),
    "weight_first": RowPlan((), Kernel.WEIGHT_FIRST),
}  # fmt: skip


def build(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        if kind == "mistral":
            model = MistralForCausalLM(
                MistralConfig(
                    **SMALL, num_attention_heads=6, num_key_value_heads=2, sliding_window=None
                )
            )
        elif kind == "qwen2":
            model = Qwen2ForCausalLM(
                Qwen2Config(**SMALL, num_attention_heads=6, num_key_value_heads=2)
            )
            for name, value in model.named_parameters():
                if name.endswith("bias"):  # zero at first: would not notice a lost bias
                    torch.nn.init.normal_(value)
        else:
            heads, kv_heads = {"grouped": (6, 2), "single": (4, 4), "llama3": (6, 2)}[kind]
            rope = LLAMA3_ROPE if kind == "llama3" else None
            model = LlamaForCausalLM(
                LlamaConfig(
                    **SMALL,
                    num_attention_heads=heads,
                    num_key_value_heads=kv_heads,
                    head_dim=16,
                    rope_parameters=rope,
                    tie_word_embeddings=kind == "single",
                )
            )
    return model.eval()


@dataclass(frozen=True)
class Reference:
    """Weights, two token sequences and their stock logits."""

    weights: LlamaWeights
    token_ids: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]

    def buffer(self, tokens: int = LENGTH) -> KvBuffer:
        return KvBuffer(torch.zeros(self.weights.layout.shape(tokens)))

    def step(self, pieces: list[tuple[int, KvBuffer, torch.Tensor]]) -> Step:
        spans, row = [], 0
        for _, buffer, positions in pieces:
            first, last = int(positions[0]), int(positions[-1])
            spans.append(Span(buffer, row, row + len(positions), first, last))
            row += len(positions)
        ids = torch.cat([self.token_ids[sequence][positions] for sequence, _, positions in pieces])
        positions = torch.cat([piece[2] for piece in pieces])
        return Step(ids, positions, tuple(spans), torch.arange(row))

    def expected(self, pieces: list[tuple[int, KvBuffer, torch.Tensor]]) -> torch.Tensor:
        return torch.cat([self.logits[sequence][positions] for sequence, _, positions in pieces])


def reference_of(model: PreTrainedModel) -> Reference:
    generator = torch.Generator().manual_seed(3)
    ids = tuple(torch.randint(0, VOCAB, (LENGTH,), generator=generator) for _ in range(2))
    with torch.inference_mode():
        logits = tuple(model(sequence[None]).logits[0] for sequence in ids)
    weights = llama_weights(model)
    for layer in weights.layers:
        for linear in layer.linears:
            linear.pack()
    weights.head.pack()
    return Reference(weights, ids, logits)


@pytest.fixture(scope="module", params=["grouped", "single", "llama3", "mistral", "qwen2"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return reference_of(build(request.param))


@pytest.fixture(scope="module")
def grouped() -> Reference:
    return reference_of(build("grouped"))


def every(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)


def assert_equal(reference: Reference, runner: FusedLlamaRunner, pieces: list) -> None:
    logits = runner.forward(reference.step(pieces))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.expected(pieces), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_pass_and_pieces_equal_the_stock_forward(reference: Reference, plan: RowPlan) -> None:
    runner = FusedLlamaRunner(reference.weights, rows=plan)
    assert_equal(reference, runner, [(0, reference.buffer(), every(0, LENGTH))])
    buffer = reference.buffer()
    for start, stop in ((0, 70), (70, 71), (71, 76), (76, 78), (78, 160), (160, LENGTH)):
        assert_equal(reference, runner, [(0, buffer, every(start, stop))])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sequences_of_all_kinds_share_a_step(reference: Reference, plan: RowPlan) -> None:
    runner = FusedLlamaRunner(reference.weights, rows=plan)
    first, second, third = (reference.buffer() for _ in range(3))
    assert_equal(reference, runner, [(0, first, every(0, 100)), (1, second, every(0, 50))])
    scattered = torch.tensor([3, 4, 9, 40, 41, 90])
    assert_equal(
        reference,
        runner,
        [
            (0, first, every(100, 101)),
            (1, second, every(50, 90)),
            (1, third, every(0, 1)),
            (0, first, scattered),
        ],
    )


def test_scattered_rows_in_several_groups_behind_a_prefix(grouped: Reference) -> None:
    runner = FusedLlamaRunner(grouped.weights)
    buffer = grouped.buffer()
    assert_equal(grouped, runner, [(0, buffer, every(0, LENGTH))])
    buffer.data[:, :, :, 5:-1:2] = 9.0  # repaired below; row 0 of the group starts at slot 5
    odd = torch.arange(5, LENGTH, 2)
    assert_equal(grouped, runner, [(0, buffer, odd)])
    assert_equal(grouped, runner, [(0, buffer, every(LENGTH - 1, LENGTH))])


def test_blocks_do_not_change_the_result(
    grouped: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "BLOCK_ROWS", 64)
    runner = FusedLlamaRunner(grouped.weights, rows=UNIFORM_ROWS)
    pieces = [(0, grouped.buffer(), every(0, 150)), (1, grouped.buffer(), every(0, 43))]
    assert_equal(grouped, runner, pieces)


def test_the_portable_attention_equals_the_stock_forward(
    grouped: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "fast_groups", sdpa_groups)
    runner = FusedLlamaRunner(grouped.weights)
    first, second = grouped.buffer(), grouped.buffer()
    assert_equal(grouped, runner, [(0, first, every(0, 100)), (1, second, every(0, 1))])
    scattered = torch.tensor([2, 3, 7, 99])
    assert_equal(grouped, runner, [(0, first, scattered), (1, second, every(1, 9))])
    assert_equal(grouped, runner, [(0, first, every(100, 101)), (1, second, every(9, 70))])


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Steps of (sequence, rows): every sequence runs to its end in random pieces."""
    left = {0: LENGTH, 1: LENGTH}
    steps = []
    while any(left.values()):
        running = [sequence for sequence in left if left[sequence]]
        chosen = draw(st.sets(st.sampled_from(running), min_size=1))
        pieces = []
        for sequence in sorted(chosen):
            rows = draw(st.sampled_from([1, 2, 5, 33, 64, 120]))
            rows = min(rows, left[sequence])
            pieces.append((sequence, rows))
            left[sequence] -= rows
        steps.append(pieces)
    return steps


@settings(max_examples=15, deadline=None)
@given(schedule=schedules(), plan=st.sampled_from(sorted(PLANS)))
def test_any_split_and_packing_equals_the_stock_forward(
    grouped: Reference, schedule: list[list[tuple[int, int]]], plan: str
) -> None:
    runner = FusedLlamaRunner(grouped.weights, rows=PLANS[plan])
    buffers = (grouped.buffer(), grouped.buffer())
    done = [0, 0]
    for pieces in schedule:
        parts = []
        for sequence, rows in pieces:
            start = done[sequence]
            parts.append((sequence, buffers[sequence], every(start, start + rows)))
            done[sequence] += rows
        assert_equal(grouped, runner, parts)


@settings(max_examples=15, deadline=None)
@given(schedule=schedules())
def test_uniform_numerics_give_the_same_bits_whatever_the_schedule(
    grouped: Reference, schedule: list[list[tuple[int, int]]]
) -> None:
    runner = FusedLlamaRunner(grouped.weights, rows=UNIFORM_ROWS, uniform=True)
    if not observe_numerics(runner).bitwise:
        pytest.skip("this machine's kernels round by row count; selection does not claim uniform")
    whole = [grouped.buffer(256), grouped.buffer(256)]
    expected = [
        runner.forward(grouped.step([(sequence, whole[sequence], every(0, LENGTH))]))
        for sequence in (0, 1)
    ]
    # left-overs of earlier leases behind the last position are read under a mask
    buffers = [KvBuffer(torch.full_like(buffer.data, 7.0)) for buffer in whole]
    done = [0, 0]
    for pieces in schedule:
        parts, wanted = [], []
        for sequence, rows in pieces:
            stop = done[sequence] + rows
            parts.append((sequence, buffers[sequence], every(done[sequence], stop)))
            wanted.append(expected[sequence][done[sequence] : stop])
            done[sequence] = stop
        assert torch.equal(runner.forward(grouped.step(parts)), torch.cat(wanted))
    for sequence in (0, 1):
        stored = buffers[sequence].slots(0, LENGTH)
        assert torch.equal(stored, whole[sequence].slots(0, LENGTH))


def test_uniform_numerics_hold_for_scattered_rows(grouped: Reference) -> None:
    runner = FusedLlamaRunner(grouped.weights, rows=UNIFORM_ROWS, uniform=True)
    buffer = grouped.buffer(256)
    pieces = [(0, buffer, every(0, LENGTH))]
    assert_equal(grouped, runner, pieces)
    scattered = torch.tensor([1, 2, 60, 63, 64, 70, 130, 131, 179])
    assert_equal(grouped, runner, [(0, buffer, scattered)])


def test_only_the_rows_asked_for_have_logits(grouped: Reference) -> None:
    runner = FusedLlamaRunner(grouped.weights)
    full = grouped.step([(0, grouped.buffer(), every(0, 20))])
    for wanted in ([], [19], [0, 7, 19]):
        step = Step(full.token_ids, full.positions, full.spans, torch.tensor(wanted).long())
        logits = runner.forward(step)
        assert logits.shape == (len(wanted), VOCAB)
        torch.testing.assert_close(logits, grouped.logits[0][wanted], rtol=0, atol=TOLERANCE)


def test_a_step_writes_its_own_slots_and_no_others(grouped: Reference) -> None:
    runner = FusedLlamaRunner(grouped.weights, rows=UNIFORM_ROWS)
    buffer = grouped.buffer()
    runner.forward(grouped.step([(0, buffer, every(0, 40))]))
    before = buffer.data.clone()
    runner.forward(grouped.step([(0, buffer, every(40, 41))]))  # padded to four rows
    changed = (buffer.data != before).any(dim=4).any(dim=2).all(dim=0).all(dim=0)
    assert changed.nonzero().flatten().tolist() == [40]
    assert buffer.length == 0


def test_merging_shares_the_weights_with_the_model(grouped: Reference) -> None:
    model = build("qwen2")
    weights = llama_weights(model)
    attention = model.model.layers[1].self_attn
    merged = weights.layers[1].qkv
    assert attention.v_proj.weight.untyped_storage().data_ptr() == merged.weight.data_ptr()
    assert attention.q_proj.bias.untyped_storage().data_ptr() == merged.bias.data_ptr()
    assert torch.equal(merged.weight[:48], attention.q_proj.weight)


def test_a_step_that_does_not_fit_is_refused(grouped: Reference) -> None:
    runner = FusedLlamaRunner(grouped.weights)
    step = grouped.step([(0, grouped.buffer(10), every(0, 11))])
    with pytest.raises(ValueError, match="do not fit"):
        runner.forward(step)


def test_other_architectures_are_refused_with_the_reason() -> None:
    gemma = Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    )
    with pytest.raises(UnsupportedModel, match="Gemma3ForCausalLM"):
        llama_weights(gemma)
    sliding = MistralForCausalLM(
        MistralConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, sliding_window=8)
    )
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        llama_weights(sliding)
    config = LlamaConfig(
        **SMALL, num_attention_heads=2, num_key_value_heads=1,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="dynamic"):
        llama_weights(LlamaForCausalLM(config))
