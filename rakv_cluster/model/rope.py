"""Whether a model's keys can be moved to other positions, and by which frequencies."""

from __future__ import annotations

from typing import Any

import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.architecture import length_dependent_rope
from rakv_cluster.model.step import Runner, Span, Step

_CHECK_TOKENS = 8
_CHECK_DISTANCE = 1000

# Largest difference between moved and recomputed keys, relative to the largest key, that is taken
# for rounding: float32 shows 1e-5 (the model's own angles round), the half types round keys.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def key_rotation(model: Any, runner: Runner) -> KeyRotation:
    """The rotation of ``model``'s keys, proven on ``runner``; or a refusal that says why.

    ``runner`` runs ``model``. The proof is on the first layer, whose keys depend on the token and
    its position alone.
    """
    config = model.config.get_text_config()
    if length_dependent_rope(config):
        return KeyRotation.refused("its rotary frequencies depend on the sequence's length")
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    kinds = getattr(config, "layer_types", None) or [""] * runner.layout.layers
    rows = [_frequencies(rotary, kind) for kind in kinds]
    if len(rows) != runner.layout.layers or any(row is None for row in rows):
        return KeyRotation.refused("its rotary frequencies are not where they are looked for")
    rotation = KeyRotation(torch.stack([row for row in rows if row is not None]))
    error = _move_error(runner, rotation)
    if not error <= _TOLERANCE[runner.layout.torch_dtype]:  # also refuses NaN
        return KeyRotation.refused(
            f"moved keys differ from recomputed ones by {error:.2g} of the largest key"
        )
    return rotation


def _frequencies(rotary: Any, kind: str) -> torch.Tensor | None:
    """Of a layer of this kind, float64 ``[n]``; None if the module has none."""
    found = getattr(rotary, f"{kind}_inv_freq", None)
    if found is None:
        found = getattr(rotary, "inv_freq", None)
    return None if found is None else found.detach().to("cpu", torch.float64)


def _move_error(runner: Runner, rotation: KeyRotation) -> float:
    """First-layer keys moved by a thousand positions (or as far as the context goes) against the
    same keys computed there; relative to the largest."""
    distance = min(_CHECK_DISTANCE, runner.context_tokens - _CHECK_TOKENS)
    shape = runner.layout.shape(distance + _CHECK_TOKENS)
    buffer = KvBuffer(torch.zeros(shape, dtype=runner.layout.torch_dtype, device=runner.device))
    here, there = slice(0, _CHECK_TOKENS), slice(distance, distance + _CHECK_TOKENS)
    for start in (0, distance):
        _compute(runner, buffer, start)
    moved = buffer.data[:1, 0, :, here].clone()
    KeyRotation(rotation.frequencies[:1]).move(moved, distance)
    expected = buffer.data[:1, 0, :, there].float()
    return float((moved.float() - expected).abs().max() / expected.abs().max())


def _compute(runner: Runner, buffer: KvBuffer, start: int) -> None:
    ids = torch.arange(1, _CHECK_TOKENS + 1) % runner.vocab_size
    positions = torch.arange(start, start + _CHECK_TOKENS)
    span = Span(buffer, 0, _CHECK_TOKENS, start, start + _CHECK_TOKENS - 1)
    runner.forward(Step(ids, positions, (span,), torch.tensor([], dtype=torch.int64)))
