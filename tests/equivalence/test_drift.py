"""Kept positions follow what is repaired beside them: by the formula, in every runner alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.drift import (
    CLIP,
    NO_DRIFT,
    PRIOR_WEIGHT,
    REACH_TOKENS,
    Drift,
    ProductFollower,
)
from rakv_cluster.model.native import native_library
from rakv_cluster.model.native_drift import NativeFollower
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.testing.runners import RUNNER_CASES
from rakv_cluster.testing.tiny_models import VOCAB_SIZE

FRONT, REUSED, TOTAL = 20, 140, 150
RUNS = np.repeat([-1, 0, 1], [FRONT, 70, REUSED - FRONT - 70])


def rotation(layers: int, dim: int) -> KeyRotation:
    half = dim // 2 - 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return KeyRotation(torch.stack([frequencies * (1 + layer) for layer in range(layers)]))


def random_buffer(layers: int, dim: int, slots: int) -> KvBuffer:
    generator = torch.Generator().manual_seed(slots)
    return KvBuffer(torch.randn(layers, 2, 3, slots, dim, generator=generator))


@st.composite
def drifts(draw: st.DrawFn) -> Drift:
    """Runs of any length with gaps, some positions repaired, a tail to compute."""
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    gaps = [draw(st.integers(0, 3)) for _ in lengths]
    runs = np.concatenate(
        [[-1] * 5]
        + [[-1] * gap + [run] * n for run, (n, gap) in enumerate(zip(lengths, gaps, strict=True))]
    ).astype(np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    picked = (runs < 0) | (rng.random(len(runs)) < draw(st.sampled_from([0.02, 0.15, 0.6])))
    picked[:5] = False
    computed = np.append(np.flatnonzero(picked), np.arange(len(runs), len(runs) + 7))
    return Drift(rotation(2, 64), runs, computed)


@given(drift=drifts(), data=st.data())
def test_steps_divide_what_follows_among_them(drift: Drift, data: st.DataObject) -> None:
    """However a repair is split, each kept position follows one of its steps."""
    count = len(drift.computed)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4)) if count > 1 else [])
    followed: list[int] = []
    repaired: list[int] = []
    for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
        rows = drift.computed[start:stop]
        between = drift.between(int(rows[0]), int(rows[-1]))
        followed.extend(between.kept.tolist())
        repaired.extend(between.repaired.tolist())

    reused = np.flatnonzero(drift.runs >= 0)
    assert repaired == np.intersect1d(reused, drift.computed).tolist()
    assert followed == np.setdiff1d(reused, drift.computed).tolist()


@given(drift=drifts(), dim=st.sampled_from([64, 128, 32]))
def test_the_native_kernel_does_what_the_products_do(drift: Drift, dim: int) -> None:
    try:
        library = native_library()
    except UnsupportedModel:
        pytest.skip("no compiler, or no vectors of 512 bits")
    drift = Drift(rotation(2, dim), drift.runs, drift.computed)
    between = drift.between(int(drift.computed[0]), int(drift.computed[-1]))
    if not len(between.repaired) or not len(between.kept):
        return
    products = random_buffer(2, dim, len(drift.runs) + 7)
    native = KvBuffer(products.data.clone())
    followers = (
        ProductFollower(drift, between, products),
        NativeFollower(library, drift, between, native),
    )
    moves = torch.randn(2, 2, 3, len(between.repaired), dim).exp()
    for buffer in (products, native):
        buffer.data[:, :, :, between.repaired] += moves
    before = products.data.clone()

    for follower in followers:
        follower.follow(1)

    assert torch.equal(products.data[0], before[0])
    # Runs of which nothing is repaired stay where they are.
    followed = np.isin(drift.runs[between.kept], drift.runs[between.repaired]).any()
    assert torch.equal(products.data[1], before[1]) != followed
    torch.testing.assert_close(native.data, products.data, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=RUNNER_CASES)
def subject(request: pytest.FixtureRequest) -> tuple[Runner, KeyRotation]:
    build, run = RUNNER_CASES[request.param]
    model = build()
    runner = run(model)
    return runner, key_rotation(model, runner)


def computed(runner: Runner, buffer: KvBuffer, positions: np.ndarray, drift: Drift) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB_SIZE, (TOTAL,), generator=generator)
    at = torch.from_numpy(positions)
    span = Span(buffer, 0, len(at), int(at[0]), int(at[-1]), drift=drift)
    runner.forward(Step(ids[at], at, (span,), torch.tensor([len(at) - 1])))


def test_a_shift_common_to_a_run_is_undone_as_far_as_the_formula_says(
    subject: tuple[Runner, KeyRotation],
) -> None:
    """The first layer's KV has no context: repair finds exactly the shift that was put there."""
    runner, turns = subject
    exact = KvBuffer(torch.zeros(runner.layout.shape(TOTAL)))
    computed(runner, exact, np.arange(TOTAL), NO_DRIFT)
    repaired = np.sort(np.random.default_rng(3).permutation(np.arange(FRONT, REUSED))[:18])
    positions = np.append(repaired, np.arange(REUSED, TOTAL))
    shifted = KvBuffer(exact.data.clone())
    shift = torch.randn(1, 2, *shifted.data.shape[2:3], 1, shifted.data.shape[4])
    shift = shift.repeat(1, 1, 1, REUSED - FRONT, 1)
    for place in range(FRONT, REUSED):
        first_layer = KeyRotation(turns.frequencies[:1])
        first_layer.move(shift[:, 0, :, place - FRONT : place - FRONT + 1], place)
    shifted.data[:1, :, :, FRONT:REUSED] += shift

    computed(runner, shifted, positions, Drift(turns, RUNS, positions))

    for place in range(FRONT, REUSED):
        same = [other for other in repaired if RUNS[other] == RUNS[place]]
        weight = sum(math.exp(-abs(place - other) / REACH_TOKENS) for other in same)
        undone = 1.0 if place in repaired else CLIP * weight / (weight + PRIOR_WEIGHT)
        left = shifted.data[0, :, :, place] - exact.data[0, :, :, place]
        expected = shift[0, :, :, place - FRONT] * (1 - undone)
        torch.testing.assert_close(left, expected, rtol=1e-3, atol=1e-3)


def test_nothing_else_is_moved(subject: tuple[Runner, KeyRotation]) -> None:
    runner, turns = subject
    buffer = KvBuffer(torch.zeros(runner.layout.shape(TOTAL)))
    computed(runner, buffer, np.arange(TOTAL), NO_DRIFT)
    buffer.data[:, :, :, FRONT:REUSED] += 0.1
    before, alone = buffer.data.clone(), KvBuffer(buffer.data.clone())
    positions = np.append(np.arange(FRONT, FRONT + 70, 7), np.arange(REUSED, TOTAL))

    computed(runner, buffer, positions, Drift(turns, RUNS, positions))
    computed(runner, alone, positions, NO_DRIFT)

    assert torch.equal(buffer.data[:, :, :, :FRONT], before[:, :, :, :FRONT])
    # Of the second run nothing was repaired.
    assert torch.equal(buffer.data[:, :, :, 90:REUSED], before[:, :, :, 90:REUSED])
    assert not torch.equal(buffer.data[:, :, :, FRONT:90], alone.data[:, :, :, FRONT:90])
