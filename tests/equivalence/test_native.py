"""Native kernels: the stock forward's logits, and the same bits for few rows as for many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model import native
from rakv_cluster.model.drift import Drift
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import pack_all
from rakv_cluster.model.llama import llama_weights
from rakv_cluster.model.native_runner import SMALL_ROWS, NativeLlamaRunner
from rakv_cluster.model.selection import KernelOptions, choose_runner
from rakv_cluster.model.step import Span, Step
from rakv_cluster.model.watch import AttentionWatch

LENGTH = 180
SIZES = {
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 1088,  # longer than one chain of multiply-adds, and than two
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "use_cache": False,
}


def build(kind: str = "llama", **sizes: int) -> LlamaForCausalLM | Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval()
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
        for name, value in model.named_parameters():
            if name.endswith("bias"):  # zero at first: would not notice a lost bias
                torch.nn.init.normal_(value)
        return model


def native_runner(model: LlamaForCausalLM | Qwen2ForCausalLM) -> NativeLlamaRunner:
    """Skips where this machine has no such kernels: selection does not claim them there."""
    weights = llama_weights(model)
    if not pack_all(weights.linears, 1 << 30):
        pytest.skip("this PyTorch packs no weights")
    try:
        return NativeLlamaRunner(weights)
    except UnsupportedModel as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def runner() -> NativeLlamaRunner:
    return native_runner(build())


@pytest.fixture(scope="module")
def token_ids() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randint(0, SIZES["vocab_size"], (2, LENGTH), generator=generator)
    return first, second


def buffer(runner: NativeLlamaRunner, fill: float = 0.0) -> KvBuffer:
    return KvBuffer(torch.full(runner.layout.shape(256), fill))


def forward(
    runner: NativeLlamaRunner,
    pieces: list[tuple[KvBuffer, torch.Tensor, torch.Tensor]],
    wanted: int = LENGTH,
) -> torch.Tensor:
    """One step over (buffer, ids, positions) pieces; the logits of the last ``wanted`` rows of
    each."""
    spans, rows, row = [], [], 0
    for target, _, positions in pieces:
        stop = row + len(positions)
        spans.append(Span(target, row, stop, int(positions[0]), int(positions[-1])))
        rows.append(torch.arange(max(stop - wanted, row), stop))
        row = stop
    ids = torch.cat([ids[positions] for _, ids, positions in pieces])
    positions = torch.cat([piece[2] for piece in pieces])
    return runner.forward(Step(ids, positions, tuple(spans), torch.cat(rows)))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_are_the_stock_forwards(kind: str, token_ids: tuple[torch.Tensor, ...]) -> None:
    model = build(kind)
    with torch.inference_mode():
        expected = model(token_ids[0][None]).logits[0]
    runner = native_runner(model)
    target = buffer(runner)
    for start, stop in ((0, 100), (100, 101), (101, 108), (108, 141), (141, LENGTH)):
        logits = forward(runner, [(target, token_ids[0], torch.arange(start, stop))])
        torch.testing.assert_close(logits, expected[start:stop], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(8, 4, 16), (4, 2, 80), (2, 2, 128), (6, 1, 64)]
)
def test_heads_of_any_size_and_number(
    heads: int, kv_heads: int, head_dim: int, token_ids: tuple[torch.Tensor, ...]
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = build(**sizes)
    with torch.inference_mode():
        expected = model(token_ids[0][None]).logits[0]
    runner = native_runner(model)
    every = torch.arange(LENGTH)
    whole = forward(runner, [(buffer(runner), token_ids[0], every)])
    torch.testing.assert_close(whole, expected, rtol=0, atol=2e-4)
    target = buffer(runner)
    for start, stop in ((0, 70), (70, 71), (71, 76), (76, 140), (140, LENGTH)):
        logits = forward(runner, [(target, token_ids[0], every[start:stop])])
        assert torch.equal(logits, whole[start:stop])


def test_a_poisoned_sequence_stays_alone(
    runner: NativeLlamaRunner, token_ids: tuple[torch.Tensor, ...]
) -> None:
    healthy, sick = buffer(runner), buffer(runner)
    for target in (healthy, sick):
        forward(runner, [(target, token_ids[0], torch.arange(70))])
    expected = forward(runner, [(healthy, token_ids[0], torch.arange(70, 72))])
    sick.data[0, 0, 0, 3] = float("nan")
    both = [(each, token_ids[0], torch.arange(70, 72)) for each in (sick, healthy)]
    logits = forward(runner, both)
    assert logits[:2].isnan().all()
    assert torch.equal(logits[2:], expected)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Steps of (sequence, rows): both sequences run to their ends in random pieces."""
    left, steps = {0: LENGTH, 1: LENGTH}, []
    while any(left.values()):
        running = sorted(sequence for sequence in left if left[sequence])
        pieces = []
        for sequence in draw(st.lists(st.sampled_from(running), min_size=1, unique=True)):
            rows = draw(st.sampled_from([1, 2, 5, 7, 19, SMALL_ROWS, SMALL_ROWS + 1]))
            pieces.append((sequence, min(rows, left[sequence])))
            left[sequence] -= pieces[-1][1]
        steps.append(pieces)
    return steps


@settings(max_examples=12, deadline=None)
@given(
    schedule=schedules(), threads=st.sampled_from([1, 2]), logits=st.sampled_from([1, 3, LENGTH])
)
def test_bits_depend_on_no_schedule(
    runner: NativeLlamaRunner,
    token_ids: tuple[torch.Tensor, ...],
    schedule: list[list[tuple[int, int]]],
    threads: int,
    logits: int,
) -> None:
    whole = [buffer(runner), buffer(runner)]
    every = torch.arange(LENGTH)
    expected = [forward(runner, [(whole[i], token_ids[i], every)]) for i in (0, 1)]
    # what earlier leases left behind the last position is not even read
    buffers, done = [buffer(runner, float("nan")), buffer(runner, float("nan"))], [0, 0]
    torch.set_num_threads(threads)
    try:
        for pieces in schedule:
            parts, wanted = [], []
            for sequence, rows in pieces:
                positions = every[done[sequence] : done[sequence] + rows]
                parts.append((buffers[sequence], token_ids[sequence], positions))
                wanted.append(expected[sequence][positions][-logits:])
                done[sequence] += rows
            assert torch.equal(forward(runner, parts, logits), torch.cat(wanted))
    finally:
        torch.set_num_threads(1)
    for sequence in (0, 1):
        stored = buffers[sequence].slots(0, LENGTH)
        assert torch.equal(stored, whole[sequence].slots(0, LENGTH))


@pytest.mark.parametrize("count", [9, SMALL_ROWS + 3])
def test_scattered_rows_have_the_bits_of_one_pass(
    runner: NativeLlamaRunner, token_ids: tuple[torch.Tensor, ...], count: int
) -> None:
    target = buffer(runner)
    expected = forward(runner, [(target, token_ids[0], torch.arange(LENGTH))])
    scattered = torch.tensor([1, 2, 60, 63, 64, 70, 130, 131, 179, *range(72, 130)])
    scattered = scattered[:count].sort().values
    before = target.data.clone()
    target.data[:, :, :, scattered] = 9.0
    assert torch.equal(forward(runner, [(target, token_ids[0], scattered)]), expected[scattered])
    assert torch.equal(target.data, before)


def test_a_step_writes_its_own_slots_and_no_others(
    runner: NativeLlamaRunner, token_ids: tuple[torch.Tensor, ...]
) -> None:
    target = buffer(runner)
    forward(runner, [(target, token_ids[0], torch.arange(40))])
    before = target.data.clone()
    forward(runner, [(target, token_ids[0], torch.arange(40, 41))])
    changed = (target.data != before).any(dim=4).any(dim=2).all(dim=0).all(dim=0)
    assert changed.nonzero().flatten().tolist() == [40]


def test_only_the_rows_asked_for_have_logits(
    runner: NativeLlamaRunner, token_ids: tuple[torch.Tensor, ...]
) -> None:
    positions = torch.arange(20)
    full = forward(runner, [(buffer(runner), token_ids[0], positions)])
    for wanted in ([], [19], [0, 7, 19]):
        span = Span(buffer(runner), 0, 20, 0, 19)
        rows = torch.tensor(wanted, dtype=torch.int64)
        logits = runner.forward(Step(token_ids[0][:20], positions, (span,), rows))
        assert torch.equal(logits, full[rows])


def test_a_watch_sees_what_it_sees_of_the_fused_decoder(
    runner: NativeLlamaRunner, token_ids: tuple[torch.Tensor, ...]
) -> None:
    seen = []
    for each in (runner, FusedLlamaRunner(runner.weights)):
        target, watch = buffer(runner), AttentionWatch((0, 1), 20)
        for start, stop in ((0, 150), (150, LENGTH)):
            positions = torch.arange(start, stop)
            spans = (Span(target, 0, stop - start, start, stop - 1, watch),)
            none = torch.tensor([], dtype=torch.int64)
            each.forward(Step(token_ids[0][positions], positions, spans, none))
        assert watch.rows == 2 * (LENGTH - 20)
        seen.append(watch.figures(LENGTH))
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-5)


def test_they_are_chosen_where_they_can_be(runner: NativeLlamaRunner) -> None:
    chosen = choose_runner(build(), context_tokens=512, options=KernelOptions())
    assert isinstance(chosen.runner, NativeLlamaRunner)
    assert chosen.kernels == "fused[uniform,native2]"
    assert chosen.numerics.bitwise


def test_without_them_the_fused_decoder_serves(
    runner: NativeLlamaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = choose_runner(build(), context_tokens=512, options=KernelOptions(native="off"))
    assert off.kernels == "fused[uniform]"
    # products that round in another way than oneDNN's
    monkeypatch.setattr(native, "_BLOCKS", (64,))
    refused = choose_runner(build(), context_tokens=512, options=KernelOptions())
    assert refused.kernels == "fused[uniform]"


@pytest.mark.parametrize("fault", ["no compiler", "a broken one"])
def test_a_missing_or_failing_compiler_is_no_error(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = ("no-such-compiler",) if fault == "no compiler" else ("false",)
    monkeypatch.setattr(native, "_COMPILERS", compilers)
    native.native_library.cache_clear()
    try:
        chosen = choose_runner(build(), context_tokens=512, options=KernelOptions())
        assert chosen.kernels == "fused[uniform]"
        with pytest.raises(UnsupportedModel, match="compile"):
            native.native_library()
    finally:
        native.native_library.cache_clear()


@pytest.mark.parametrize(("count", "sizes"), [(10, {}), (70, {}), (10, {"head_dim": 288})])
def test_what_follows_a_repair_is_as_in_the_fused_decoder(
    count: int, sizes: dict[str, int]
) -> None:
    """Of few rows, which are one call otherwise, of many, and of heads too long for the kernel."""
    runner = native_runner(build(**sizes))
    fused = FusedLlamaRunner(runner.weights)
    half = runner.layout.head_dim // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    rotation = KeyRotation(frequencies.repeat(runner.layout.layers, 1))
    repaired = torch.linspace(3, LENGTH - 8, count).long()
    positions = torch.cat([repaired, torch.arange(LENGTH - 5, LENGTH)])
    runs = np.repeat([-1, 0, 1], [2, 90, LENGTH - 97])
    drift = Drift(rotation, runs, positions.numpy())
    ids = torch.randint(3, SIZES["vocab_size"], (len(positions),))
    reused = torch.randn(runner.layout.shape(LENGTH))
    buffers = []
    for each in (fused, runner):
        buffer = KvBuffer(reused.clone())
        span = Span(buffer, 0, len(positions), 3, LENGTH - 1, drift=drift)
        each.forward(Step(ids, positions, (span,), torch.tensor([len(positions) - 1])))
        buffers.append(buffer.data)

    torch.testing.assert_close(buffers[1], buffers[0], rtol=1e-3, atol=1e-3)
    kept = torch.tensor([place for place in range(3, LENGTH - 5) if place not in repaired])
    assert not torch.equal(buffers[1][:, :, :, kept], reused[:, :, :, kept])
