"""Keys moved to another position are the keys that the model computes there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.rope import key_rotation
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.testing.tiny_models import tiny_gemma3, tiny_llama

TOKENS = 12


def keys_at(model: PreTrainedModel, start: int) -> torch.Tensor:
    """Keys of all layers ``[layers, kv_heads, tokens, head_dim]``, computed by the stock model.

    Rotary positions are relative: the same tokens alone, all positions shifted, have equal states.
    """
    ids = torch.arange(3, 3 + TOKENS)[None]
    cache = DynamicCache()
    positions = torch.arange(start, start + TOKENS)[None]
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
    return torch.stack([layer.keys[0] for layer in cache.layers])


def rotation_of(model: PreTrainedModel) -> KeyRotation:
    layout = observe_layout(model)
    return key_rotation(model, TransformersRunner(model, layout, context_tokens=2048))


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
@pytest.mark.parametrize(("old", "new"), [(0, 700), (700, 0), (130, 131), (5, 5)])
def test_moved_keys_are_recomputed_keys(build: object, old: int, new: int) -> None:
    model = build()  # type: ignore[operator]  # one of the two above
    stored, expected = keys_at(model, old), keys_at(model, new)
    rotation = rotation_of(model)

    moved = stored.clone()
    rotation.move(moved, new - old)

    assert rotation.refusal == ""
    largest = float(expected.abs().max())
    assert float((moved - expected).abs().max()) < 1e-4 * largest
    if old != new:
        assert float((stored - expected).abs().max()) > 1e-2 * largest


def test_half_precision_keys_move_with_float32_arithmetic() -> None:
    model = tiny_llama()
    stored, expected = keys_at(model, 0), keys_at(model, 300)
    moved = stored.to(torch.bfloat16)

    rotation_of(model).move(moved, 300)

    error = (moved.float() - expected).abs().max() / expected.abs().max()
    assert float(error) < 2e-2


def test_length_dependent_frequencies_are_refused() -> None:
    model = tiny_llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

    rotation = rotation_of(model)

    assert "depend on the sequence's length" in rotation.refusal
    with pytest.raises(ValueError, match="length"):
        rotation.move(torch.zeros(2, 2, 4, 16), 1)


def test_keys_that_turn_otherwise_are_refused() -> None:
    model = tiny_llama()
    layout = observe_layout(model)
    runner = TransformersRunner(model, layout, context_tokens=2048)
    frequencies = model.model.rotary_emb.inv_freq * 1.01
    liar = SimpleNamespace(
        config=model.config,
        model=SimpleNamespace(rotary_emb=SimpleNamespace(inv_freq=frequencies)),
    )

    assert "differ from recomputed" in key_rotation(liar, runner).refusal


def test_long_runs_move_as_short_ones_do() -> None:
    rotation = KeyRotation(torch.rand(2, 8, dtype=torch.float64))
    keys = torch.randn(2, 2, 700, 16)
    whole, pieces = keys.clone(), keys.clone()

    rotation.move(whole, 41)
    for piece in pieces.split(97, dim=2):
        rotation.move(piece, 41)

    torch.testing.assert_close(whole, pieces, rtol=0, atol=0)
    rotation.move(whole, -41)
    torch.testing.assert_close(whole, keys, rtol=1e-5, atol=1e-5)
