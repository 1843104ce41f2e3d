"""The measure of what blending costs: nothing when all is repaired, something when nothing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.reuse.calibrating import measure_curves, shuffled_prompt
from rakv_cluster.reuse.fidelity import REFERENCE_TOKENS, FidelityCase, FidelityPrompt
from rakv_cluster.reuse.probing import ProbeSettings
from rakv_cluster.reuse.selection import everything, nothing
from rakv_cluster.testing.tiny_models import VOCAB_SIZE, tiny_gemma3, tiny_llama


def prompt(seed: int) -> FidelityPrompt:
    rng = np.random.default_rng(seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCAB_SIZE, length).tolist())

    return shuffled_prompt(text(12), [text(30), text(40), text(25)], text(6), rng, answer=text(5))


@pytest.fixture(params=[tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    built: PreTrainedModel = request.param()
    return built


def test_all_repaired_is_exact_and_nothing_repaired_is_not(model: PreTrainedModel) -> None:
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
    case = FidelityCase(runner, key_rotation(model, runner), prompt(1))

    whole, none = case.measure(everything, 1.0), case.measure(nothing, 0.0)

    assert len(case.reference) == REFERENCE_TOKENS
    assert whole.repaired == 95
    assert whole.kl < 1e-5
    assert (whole.top1, whole.agreement) == (1.0, 1.0)
    assert whole.answer_logp == pytest.approx(whole.exact_answer_logp, abs=1e-3)
    assert none.repaired == 0
    assert none.kl > 0.01
    assert abs(none.answer_logp - none.exact_answer_logp) > 1e-3


def test_a_curve_ends_in_nothing_lost(model: PreTrainedModel) -> None:
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
    rotation = key_rotation(model, runner)

    *_, curves = measure_curves(
        runner,
        rotation,
        [prompt(seed) for seed in range(4)],
        frozenset(),
        probe=ProbeSettings((0, 1)),
        fractions=(0.0, 0.3, 1.0),
    )

    for points in (curves.plain, curves.probed):
        assert [point.fraction for point in points] == [0.0, 0.3, 1.0]
        assert points[0].kl_low <= points[0].kl <= points[0].kl_high <= points[0].kl_p95_upper
        assert points[0].kl > 100 * max(points[2].kl, 1e-9)
        assert points[2].top1 == points[2].agreement == 1.0
    assert curves.plain[0] == curves.probed[0]
    assert curves.plain[1] != curves.probed[1]


def test_without_a_probe_there_is_no_curve_of_it(model: PreTrainedModel) -> None:
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)

    (curves,) = measure_curves(
        runner, key_rotation(model, runner), [prompt(1)], frozenset(), fractions=(0.5,)
    )

    assert curves.probed == ()


def test_a_document_behind_the_same_ones_twice_teaches_nothing(model: PreTrainedModel) -> None:
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
    asked = replace(prompt(1), donor_order=(1, 0, 2), other_order=(1, 2, 0))

    case = FidelityCase(runner, key_rotation(model, runner), asked)

    known = [
        bool(np.isfinite(case.reused.sensitivity[case.reused.positions < stop][start - 12 :]).all())
        for start, stop in asked.places
    ]
    assert known == [True, False, True]


@pytest.mark.parametrize("count", [1, 9])
def test_what_a_selection_writes_follows_from_its_own_words(
    model: PreTrainedModel, count: int
) -> None:
    """Asked with its first words behind the question, it goes on with the others."""
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
    rotation = key_rotation(model, runner)
    asked = prompt(1)
    case = FidelityCase(runner, rotation, asked)
    text = case.measure(nothing, 0.0, text=True).text
    assert text != case.reference

    longer = replace(asked, question=(*asked.question, *text[:count]), answer=())
    rest = FidelityCase(runner, rotation, longer).measure(nothing, 0.0, text=True).text

    assert rest[: len(text) - count] == text[count:]


def test_where_all_is_repaired_it_writes_the_reference(model: PreTrainedModel) -> None:
    runner = TransformersRunner(model, observe_layout(model), context_tokens=2048)
    case = FidelityCase(runner, key_rotation(model, runner), prompt(1))

    assert case.measure(everything, 1.0, text=True).text == case.reference
