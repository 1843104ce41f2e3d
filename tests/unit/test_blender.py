"""Donors into a buffer: keys moved, values as they were, faults computed instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rakv_cluster.chunking.boundaries import ChunkLimits
from rakv_cluster.chunking.openings import Openings
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.layout import bits
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.step import Span, Step
from rakv_cluster.reuse.blender import Blended, Blender, BlendSupport
from rakv_cluster.reuse.calibration import Calibration, CurvePoint
from rakv_cluster.reuse.costs import Costs, CostView
from rakv_cluster.reuse.probing import ProbeSettings
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import NAMESPACE, no_cuts
from rakv_cluster.testing.faulty_store import Fault, FaultyStore
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_llama
from rakv_cluster.types import BlendWish, ChunkedPrompt, Tier

LIMITS = ChunkLimits(min_tokens=8, max_tokens=16)
FRONT, FIRST, SECOND, NEW = (
    [3 + (seed * 37 + 11 * i + i * i) % 250 for i in range(length)]
    for seed, length in ((1, 10), (2, 32), (3, 20), (4, 25))
)
QUESTION = [5, 6, 7]


class Rig:
    """A tiny model, exact KV of prompts, and a store that holds one prompt's chunks."""

    def __init__(self) -> None:
        model = tiny_llama()
        self.runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
        self.rotation = key_rotation(model, self.runner)
        self.store = MemoryStore(1 << 28, ManualClock())
        self.openings = Openings()

    def prompt(self, *segments: Sequence[int]) -> ChunkedPrompt:
        return chunk_prompt(NAMESPACE, segments, no_cuts(VOCAB_SIZE), LIMITS)

    def exact(self, prompt: ChunkedPrompt) -> KvBuffer:
        total = len(prompt.token_ids)
        buffer = self.empty(total)
        step = Step(
            torch.tensor(prompt.token_ids),
            torch.arange(total),
            (Span(buffer, 0, total, 0, total - 1),),
            torch.tensor([], dtype=torch.int64),
        )
        self.runner.forward(step)
        return buffer

    def empty(self, tokens: int) -> KvBuffer:
        return KvBuffer(torch.zeros(self.runner.layout.shape(tokens)))

    def keep(self, prompt: ChunkedPrompt) -> None:
        buffer = self.exact(prompt)
        self.store.put(
            [
                ChunkRecord(
                    chunk.prefix_key, NAMESPACE, chunk.token_ids, chunk.start, self.runner.layout,
                    bits(buffer.slots(chunk.start, chunk.end).contiguous()), 1.0, "c", 0.0,
                )
                for chunk in prompt.chunks
            ]
        )  # fmt: skip

    def within_budget(self, prompt: ChunkedPrompt, calibration: Calibration) -> Blended:
        """Of all that is kept, as the default divergence allows."""
        return self.blend(
            prompt,
            self.empty(len(prompt.token_ids)),
            store=self.store,
            rotation=self.rotation,
            recompute=-1.0,
            calibration=calibration,
        )

    def blend(
        self,
        prompt: ChunkedPrompt,
        buffer: KvBuffer,
        *,
        store: ChunkStore,
        rotation: KeyRotation,
        price_loads: bool = False,
        recompute: float = 0.0,
        costs: CostView | None = None,
        calibration: Calibration | None = None,
    ) -> Blended:
        support = BlendSupport(
            rotation,
            lambda: calibration or Calibration(),
            probe=ProbeSettings((0, 1), most_share=0.25),
        )
        blender = Blender(
            support, store, self.runner.layout, "c",
            share_across_classes=False, price_loads=price_loads, openings=self.openings,
        )  # fmt: skip
        total = len(prompt.token_ids)
        wish = BlendWish(recompute=recompute)
        covered = len(FRONT)
        return blender.blend(
            wish, prompt, buffer, costs or slow_compute(), covered=covered, known_tokens=total
        )


def slow_compute(load_ms_per_mb: float = 0.5) -> CostView:
    """A millisecond per token computed."""
    costs = Costs(step_tokens=512)
    costs.observe_prefill(0, 64, 64.0)
    costs.observe_decode(1, 1.0)
    for _ in range(40):
        costs.observe_load(Tier.RAM, 1_000_000, load_ms_per_mb, 0.0)
    return costs.view(0.0)


@pytest.fixture(scope="module")
def rig() -> Rig:
    rig = Rig()
    rig.keep(rig.prompt(FRONT, FIRST, SECOND, QUESTION))
    return rig


def test_reused_slots_hold_first_layer_kv_as_computed_there(rig: Rig) -> None:
    """The first layer's KV depends on the token and its position alone, so it must be exact."""
    prompt = rig.prompt(FRONT, SECOND, NEW, FIRST, QUESTION)
    exact, buffer = rig.exact(prompt), rig.empty(len(prompt.token_ids))

    blended = rig.blend(prompt, buffer, store=rig.store, rotation=rig.rotation)

    second = np.arange(len(FRONT), len(FRONT) + len(SECOND))
    start = len(FRONT) + len(SECOND) + len(NEW)
    reused = torch.from_numpy(np.concatenate([second, np.arange(start, start + len(FIRST))]))
    left = sorted(set(range(len(FRONT), len(prompt.token_ids))) - set(reused.tolist()))
    assert blended.to_compute.tolist() == left
    for kind in (0, 1):
        torch.testing.assert_close(
            buffer.data[0, kind][:, reused], exact.data[0, kind][:, reused], atol=1e-4, rtol=1e-4
        )
    assert not torch.allclose(buffer.values(1)[:, reused], exact.values(1)[:, reused], atol=1e-3)


def test_a_refused_rotation_blends_nothing(rig: Rig) -> None:
    prompt = rig.prompt(FRONT, SECOND, FIRST, QUESTION)
    buffer = rig.empty(len(prompt.token_ids))

    blended = rig.blend(
        prompt, buffer, store=rig.store, rotation=KeyRotation.refused("of its kind")
    )

    assert "of its kind" in blended.reason
    assert not len(blended.to_compute)
    assert not buffer.data.any()


def test_unknown_text_blends_nothing(rig: Rig) -> None:
    prompt = rig.prompt(FRONT, NEW, QUESTION)

    blended = rig.blend(
        prompt, rig.empty(len(prompt.token_ids)), store=rig.store, rotation=rig.rotation
    )

    assert blended.reason == "no cached text behind the exact prefix"


@pytest.mark.parametrize("fault", [each for each in Fault if each is not Fault.DELAY])
@pytest.mark.parametrize("healthy_calls", [0, 1, 2])
def test_what_a_store_does_not_deliver_is_computed_and_never_nan(
    rig: Rig, fault: Fault, healthy_calls: int
) -> None:
    calls = iter([Fault.NONE] * healthy_calls)
    store = FaultyStore(rig.store, lambda: next(calls, fault))
    prompt = rig.prompt(FRONT, SECOND, NEW, FIRST, QUESTION)
    buffer = rig.empty(len(prompt.token_ids))

    blended = rig.blend(prompt, buffer, store=store, rotation=rig.rotation)

    assert torch.isfinite(buffer.data).all()
    left = set(blended.to_compute.tolist()) or set(range(len(FRONT), len(prompt.token_ids)))
    filled = {p for p in range(len(prompt.token_ids)) if buffer.slots(p, p + 1).any()}
    assert filled >= set(range(len(FRONT), len(prompt.token_ids))) - left


def test_blending_that_saves_nothing_is_not_done(rig: Rig) -> None:
    prompt = rig.prompt(FRONT, SECOND, FIRST, QUESTION)

    answers = [
        rig.blend(
            prompt,
            rig.empty(len(prompt.token_ids)),
            store=rig.store,
            rotation=rig.rotation,
            price_loads=True,
            recompute=recompute,
        )
        for recompute in (0.0, 1.0)
    ]

    assert answers[0].kept == len(FIRST) + len(SECOND)
    assert answers[1].reason == "computing is expected to be faster"


def test_a_store_slower_than_computing_is_not_loaded_from(rig: Rig) -> None:
    prompt = rig.prompt(FRONT, SECOND, FIRST, QUESTION)
    buffer = rig.empty(len(prompt.token_ids))

    blended = rig.blend(
        prompt,
        buffer,
        store=rig.store,
        rotation=rig.rotation,
        price_loads=True,
        costs=slow_compute(load_ms_per_mb=1e5),
    )

    assert blended.reason == "computing is expected to be faster"
    assert not buffer.data.any()


def point(fraction: float, upper: float) -> CurvePoint:
    return CurvePoint(fraction, upper, upper, upper, upper, upper, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


CURVES = Calibration("m", 8, "texts", (point(0.5, 0.1),), (point(0.25, 0.1),))
"""With the probe half as much has to be repaired."""


@pytest.mark.parametrize(
    ("new_tokens", "probed", "fraction"),
    [(0, True, 0.25), (len(NEW), False, 0.5)],
    ids=["a short question", "as much new text as the probe saves"],
)
def test_a_budget_is_met_in_the_cheaper_way(
    rig: Rig, new_tokens: int, probed: bool, fraction: float
) -> None:
    """52 tokens are reused: the probe saves 13 of them, and computes all that is new twice."""
    prompt = rig.prompt(FRONT, NEW[:new_tokens], SECOND, FIRST, QUESTION)

    blended = rig.within_budget(prompt, CURVES)

    assert blended.probe.pending == probed
    assert blended.repaired == round(fraction * (len(FIRST) + len(SECOND)))


def test_a_budget_that_one_way_cannot_meet_is_met_in_the_other(rig: Rig) -> None:
    prompt = rig.prompt(FRONT, NEW, SECOND, FIRST, QUESTION)
    only_probed = Calibration("m", 8, "texts", (point(0.5, 0.3),), (point(0.25, 0.1),))

    blended = rig.within_budget(prompt, only_probed)

    assert blended.probe.pending
    assert blended.expected_kl == 0.1
