"""The packed forward against the stock transformers forward: any split, any packing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.attention import GROUP_ROWS
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.self_check import stock_logits
from rakv_cluster.model.step import Span, Step
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_gemma3, tiny_llama

TOLERANCE = 2e-4
WINDOW = 16
LENGTH = 90
SEQUENCES = 3


@dataclass(frozen=True)
class Reference:
    """A runner, token sequences and what the stock forward says about them."""

    runner: TransformersRunner
    token_ids: list[torch.Tensor]
    logits: list[torch.Tensor]

    def buffer(self, tokens: int = LENGTH) -> KvBuffer:
        return KvBuffer(torch.zeros(self.runner.layout.shape(tokens)))


def make_reference(model: PreTrainedModel, lengths: list[int]) -> Reference:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    logits = [stock_logits(model, sequence) for sequence in ids]
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
    return Reference(runner, ids, logits)


MODELS = {"llama": tiny_llama, "gemma3": lambda: tiny_gemma3(window=WINDOW)}


@pytest.fixture(scope="module", params=sorted(MODELS))
def reference(request: pytest.FixtureRequest) -> Reference:
    return make_reference(MODELS[request.param](), [LENGTH] * SEQUENCES)


def run(
    reference: Reference, pieces: list[tuple[int, KvBuffer, torch.Tensor]]
) -> list[torch.Tensor]:
    """One step over (sequence, buffer, positions) pieces; logits of every row, by piece."""
    spans, row = [], 0
    for _, buffer, positions in pieces:
        first, last = int(positions[0]), int(positions[-1])
        spans.append(Span(buffer, row, row + len(positions), first, last))
        row += len(positions)
    ids = torch.cat([reference.token_ids[sequence][positions] for sequence, _, positions in pieces])
    step = Step(ids, torch.cat([p for _, _, p in pieces]), tuple(spans), torch.arange(row))
    logits = reference.runner.forward(step)
    assert logits.dtype == torch.float32
    assert logits.shape == (row, VOCAB_SIZE)
    return list(logits.split([len(positions) for _, _, positions in pieces]))


def assert_close(
    reference: Reference, sequence: int, positions: torch.Tensor, logits: torch.Tensor
) -> None:
    difference = (logits - reference.logits[sequence][positions]).abs().max()
    assert float(difference) <= TOLERANCE


def test_one_pass_is_bitwise_equal_on_llama() -> None:
    reference = make_reference(tiny_llama(), [LENGTH])
    (logits,) = run(reference, [(0, reference.buffer(), torch.arange(LENGTH))])
    assert torch.equal(logits, reference.logits[0])


def test_one_pass_within_the_window_is_bitwise_equal_on_gemma3() -> None:
    reference = make_reference(tiny_gemma3(window=WINDOW), [WINDOW])
    (logits,) = run(reference, [(0, reference.buffer(), torch.arange(WINDOW))])
    assert torch.equal(logits, reference.logits[0])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_split_and_packing(reference: Reference, data: st.DataObject) -> None:
    buffers = [reference.buffer() for _ in range(SEQUENCES)]
    done = [0] * SEQUENCES
    while min(done) < LENGTH:
        takes = [data.draw(st.sampled_from([0, 1, 1, 2, 5, 17, 40])) for _ in range(SEQUENCES)]
        order = data.draw(st.permutations(range(SEQUENCES)))
        pieces = []
        for sequence in order:
            stop = min(LENGTH, done[sequence] + max(takes[sequence], max(takes) == 0))
            if stop > done[sequence]:
                pieces.append((sequence, buffers[sequence], torch.arange(done[sequence], stop)))
                done[sequence] = stop
        if not pieces:
            continue
        for (sequence, _, positions), logits in zip(pieces, run(reference, pieces), strict=True):
            assert_close(reference, sequence, positions, logits)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    scattered=st.lists(
        st.sets(st.integers(0, LENGTH - 1), min_size=1, max_size=30), min_size=1, max_size=SEQUENCES
    )
)
def test_scattered_rows_over_a_filled_buffer(
    reference: Reference, scattered: list[set[int]]
) -> None:
    whole = torch.arange(LENGTH)
    buffers = [reference.buffer() for _ in scattered]
    run(reference, [(i, buffer, whole) for i, buffer in enumerate(buffers)])
    before = [buffer.data.clone() for buffer in buffers]
    pieces = [
        (i, buffers[i], torch.tensor(sorted(positions))) for i, positions in enumerate(scattered)
    ]
    for (sequence, _, positions), logits in zip(pieces, run(reference, pieces), strict=True):
        assert_close(reference, sequence, positions, logits)
    for buffer, data in zip(buffers, before, strict=True):
        assert float((buffer.data - data).abs().max()) <= TOLERANCE


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged=st.sets(st.integers(0, LENGTH - 2), min_size=1, max_size=40))
def test_scattered_rows_repair_their_slots(reference: Reference, damaged: set[int]) -> None:
    buffer = reference.buffer()
    run(reference, [(0, buffer, torch.arange(LENGTH))])
    good = buffer.data.clone()
    positions = torch.tensor(sorted(damaged))
    buffer.data[:, :, :, positions] = 5.0
    run(reference, [(0, buffer, torch.tensor([*sorted(damaged), LENGTH - 1]))])
    assert float((buffer.data - good).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_prefill_longer_than_a_group_behind_a_prefix(name: str) -> None:
    length = 3 * GROUP_ROWS + 40
    reference = make_reference(MODELS[name](), [length])
    buffer = reference.buffer(length)
    for start, stop in ((0, 33), (33, length)):
        positions = torch.arange(start, stop)
        (logits,) = run(reference, [(0, buffer, positions)])
        assert_close(reference, 0, positions, logits)


def test_slots_behind_the_last_position_are_not_read(reference: Reference) -> None:
    buffer = reference.buffer(2 * LENGTH)
    buffer.data[:, :, :, 40:] = 1e4
    (logits,) = run(reference, [(0, buffer, torch.arange(40))])
    assert_close(reference, 0, torch.arange(40), logits)


def test_slots_before_the_window_are_not_read() -> None:
    """A model whose layers all slide: what no row can reach may hold anything."""
    model = tiny_gemma3(window=WINDOW, layer_types=("sliding_attention",) * 3)
    reference = make_reference(model, [LENGTH])
    buffer = reference.buffer()
    run(reference, [(0, buffer, torch.arange(LENGTH - 1))])
    buffer.data[:, :, :, : LENGTH - WINDOW] = 1e4

    last = torch.tensor([LENGTH - 1])
    (logits,) = run(reference, [(0, buffer, last)])

    assert_close(reference, 0, last, logits)


def test_only_wanted_rows_get_logits(reference: Reference) -> None:
    positions = torch.arange(20)
    wanted = torch.tensor([4, 19])
    span = Span(reference.buffer(), 0, 20, 0, 19)
    ids = reference.token_ids[0][:20]
    logits = reference.runner.forward(Step(ids, positions, (span,), wanted))
    assert_close(reference, 0, wanted, logits)
    none = reference.runner.forward(Step(ids, positions, (span,), torch.arange(0)))
    assert none.shape == (0, VOCAB_SIZE)


def test_lengths_are_left_alone(reference: Reference) -> None:
    buffer = reference.buffer()
    run(reference, [(0, buffer, torch.arange(10))])
    assert buffer.length == 0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 3, 0, 2)], "spans cover 3 of 5 rows"),
        ([(0, 3, 0, 2), (4, 5, 0, 0)], "expected 3"),
        ([(0, 0, 0, 0), (0, 5, 0, 4)], "expected 0"),
        ([(0, 5, LENGTH - 4, LENGTH)], "do not fit"),
        ([(0, 5, -1, 3)], "do not fit"),
    ],
)
def test_a_wrong_step_is_refused(
    reference: Reference, spans: list[tuple[int, int, int, int]], message: str
) -> None:
    buffer = reference.buffer()
    step = Step(
        torch.zeros(5, dtype=torch.int64),
        torch.arange(5),
        tuple(Span(buffer, *span) for span in spans),
        torch.arange(5),
    )
    with pytest.raises(ValueError, match=message):
        reference.runner.forward(step)
    assert not buffer.data.any()
