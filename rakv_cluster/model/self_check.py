"""Proof at load that the packed forward computes what the stock forward computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.architecture import observe_layout
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.step import Runner, Span, Step

CHECK_TOKENS = 48

# Where the sequence is cut: a first pass, one-token steps, a verify-like step, a longer rest.
_CUTS = (0, 19, 20, 21, 26, CHECK_TOKENS)
_SCATTERED = (2, 7, 8, 25, 40)

# Largest difference between packed and stock logits that is taken for rounding, relative to the
# largest logit. float32 shows ~1e-6; the half types round every activation.
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 5e-2}


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner that passed its check, the name of its kernels, and its largest logit error."""

    runner: Runner
    kernels: str
    error: float


def build_runner(model: PreTrainedModel, *, context_tokens: int) -> BuiltRunner:
    """A checked runner over ``model``, which it takes over.

    Raises :class:`UnsupportedModel` where the model's layers are not what the packed forward
    needs, or its logits differ from the stock forward's by more than rounding explains.
    """
    layout = observe_layout(model)
    ids = check_ids(int(model.get_output_embeddings().weight.shape[0]))
    expected = stock_logits(model, ids)
    runner = TransformersRunner(model, layout, context_tokens=context_tokens)
    error = largest_error(runner, ids, expected)
    limit = _TOLERANCE[layout.torch_dtype] * float(expected.abs().max())
    if not error <= limit:  # also refuses NaN
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} is not supported: packed logits differ from "
            f"the stock forward by {error:.3g} (limit {limit:.3g})"
        )
    return BuiltRunner(runner, "transformers", error)


def check_step(runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
    """The check's tokens and the logits that ``runner`` gives them in one pass."""
    ids = check_ids(runner.vocab_size)
    every = torch.arange(CHECK_TOKENS)
    return ids, _forward(runner, [(_buffer(runner), every)], ids)


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
    positions = torch.cat([positions for _, positions in sequences])
    wanted = expected[positions.to(expected.device)]
    return float((_forward(runner, sequences, token_ids) - wanted).abs().max())


def _forward(
    runner: Runner, sequences: list[tuple[KvBuffer, torch.Tensor]], token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits of the given positions of ``token_ids``, run in one step."""
    spans, row = [], 0
    for buffer, positions in sequences:
        first, last = int(positions[0]), int(positions[-1])
        spans.append(Span(buffer, row, row + len(positions), first, last))
        row += len(positions)
    positions = torch.cat([positions for _, positions in sequences])
    return runner.forward(Step(token_ids[positions], positions, tuple(spans), torch.arange(row)))
