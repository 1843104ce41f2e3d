"""The default model on the fused decoder: what is claimed at load, checked at length."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.model.step import Span, Step

pytestmark = pytest.mark.model

TEXT = "The museum keeps 4 maps of the harbour; the oldest was drawn in 1731 by a pilot's widow. "
LENGTH = 530
# one pass ends a kernel's block at 512 keys; pieces end before, at and behind cells of 64
CUTS = (0, 300, 301, 306, 319, 320, 383, 511, 512, 513, 522, LENGTH)


def forward(
    model: LoadedModel, buffer: KvBuffer, ids: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Logits of the positions ``[start, stop)``."""
    rows = stop - start
    span = Span(buffer, 0, rows, start, stop - 1)
    positions = torch.arange(start, stop)
    return model.runner.forward(Step(ids[start:stop], positions, (span,), torch.arange(rows)))


def test_pieces_give_the_bits_of_one_pass(default_model: LoadedModel) -> None:
    assert isinstance(default_model.runner, FusedLlamaRunner)
    ids = torch.tensor(default_model.tokenizer(TEXT * 30).input_ids[:LENGTH])
    layout = default_model.card.layout
    whole, pieces = (KvBuffer(torch.zeros(layout.shape(768))) for _ in range(2))

    expected = forward(default_model, whole, ids, 0, LENGTH)
    actual = torch.cat(
        [forward(default_model, pieces, ids, start, stop) for start, stop in pairwise(CUTS)]
    )

    limit = default_model.card.near_tie_eps
    assert float((actual - expected).abs().max()) <= limit
    if limit == 0:
        assert torch.equal(pieces.slots(0, LENGTH), whole.slots(0, LENGTH))
