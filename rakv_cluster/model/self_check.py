"""Proof at load that the packed forward computes what the stock forward computes."""

from __future__ import annotations

from itertools import pairwise

import torch
from transformers import PreTrainedModel

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.step import Runner, Span, Step

CHECK_TOKENS = 48

# Where the sequence is cut: a first pass, one-token steps, a verify-like step, a longer rest.
_CUTS = (0, 19, 20, 21, 26, CHECK_TOKENS)
_SCATTERED = (2, 7, 8, 25, 40)


def check_ids(vocab_size: int) -> torch.Tensor:
    """The tokens of the check: int64 ``[CHECK_TOKENS]``, fixed by the vocabulary's size."""
    generator = torch.Generator().manual_seed(48)
    return torch.randint(0, vocab_size, (CHECK_TOKENS,), generator=generator)


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 ``[T, vocab_size]`` of one plain forward. Call before a runner takes ``model``."""
    logits: torch.Tensor = model(input_ids=token_ids[None].to(model.device), use_cache=False).logits
    return logits[0].float()


def largest_error(runner: Runner, token_ids: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest logit difference to ``expected`` over the ways a sequence can be computed.

    ``token_ids`` is int64 ``[CHECK_TOKENS]``; ``expected`` their :func:`stock_logits`. Tried: one
    pass; in pieces, packed with another sequence; scattered positions again over filled buffers.
    """
    whole, pieces = _buffer(runner), _buffer(runner)
    every = torch.arange(CHECK_TOKENS)
    worst = _difference(runner, [(whole, every)], token_ids, expected)
    for start, stop in pairwise(_CUTS):
        rows = [(pieces, every[start:stop]), (whole, every[: stop - start])]
        worst = max(worst, _difference(runner, rows, token_ids, expected))
    scattered = torch.tensor(_SCATTERED)
    return max(worst, _difference(runner, [(pieces, scattered)], token_ids, expected))


def _buffer(runner: Runner) -> KvBuffer:
    shape = runner.layout.shape(CHECK_TOKENS)
    return KvBuffer(torch.zeros(shape, dtype=runner.layout.torch_dtype, device=runner.device))


def _difference(
    runner: Runner,
    sequences: list[tuple[KvBuffer, torch.Tensor]],
    token_ids: torch.Tensor,
    expected: torch.Tensor,
) -> float:
    """Run the given positions of ``token_ids`` in one step; largest difference of their logits."""
    spans, row = [], 0
    for buffer, positions in sequences:
        first, last = int(positions[0]), int(positions[-1])
        spans.append(Span(buffer, row, row + len(positions), first, last))
        row += len(positions)
    positions = torch.cat([positions for _, positions in sequences])
    step = Step(token_ids[positions], positions, tuple(spans), torch.arange(row))
    wanted = expected[positions.to(expected.device)]
    return float((runner.forward(step) - wanted).abs().max())
