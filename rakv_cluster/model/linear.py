"""Matrix products with few rows on the CPU: which kernel, how many rows to pad to, which copies.

A decode step multiplies every weight by one row, a verification or a batch by a handful. The BLAS
call behind ``F.linear`` is poor at that: on some CPUs two rows cost twice as much as one, and one
row twice what reading the weight costs. Three kernels compute the same product:

``plain``         ``F.linear``; needs nothing.
``weight_first``  ``(W @ x.T).T``: the same BLAS with its operands' roles swapped. Needs nothing.
``packed``        oneDNN over a copy of the weight in oneDNN's own blocked order, one copy for
                  every row count. Its rows do not depend on how many rows stand beside them.

:func:`plan_rows` turns measured times into a :class:`RowPlan`. Nothing here assumes which kernel
wins, and :func:`usable_kernels` compares each with ``plain`` before it may. ``packed`` uses
operators that PyTorch keeps for its own compiler: where they are missing or wrong, it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn import functional


class Kernel(str, Enum):
    """A way to compute ``x @ W.T + b``."""

    PLAIN = "plain"
    WEIGHT_FIRST = "weight_first"
    PACKED = "packed"


_PREFERENCE = (Kernel.PACKED, Kernel.WEIGHT_FIRST, Kernel.PLAIN)

_PACK_ROWS = 16
"""Rows that oneDNN is told to expect; it picks the same blocked order for any number from 2 on."""

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Row counts of the load-time benchmark: the steps of decode, batches and verification."""


@dataclass(slots=True, eq=False)
class Linear:
    """One weight ``[out, in]``, its bias, and its packed copy if there is one."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    packed: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """Columns of a result."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, and of a packed copy of it."""
        return self.weight.numel() * self.weight.element_size()

    def pack(self) -> None:
        """Make the packed copy; raises ``RuntimeError`` where PyTorch cannot."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)

    def apply(self, x: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``; ``weight_first`` returns a transposed view.

        A weight without a packed copy answers ``packed`` with ``plain``.
        """
        if kernel is Kernel.PACKED and self.packed is not None:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.bias, "none", [], ""
            )
            return result
        if kernel is Kernel.WEIGHT_FIRST:
            result = torch.mm(self.weight, x.t()).t()
            return result if self.bias is None else result.add_(self.bias)
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Steps of up to ``max_rows`` rows run on ``kernel`` with at least ``min_rows`` rows."""

    max_rows: int
    min_rows: int
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Choices by ascending ``max_rows``, and the kernel for more rows than the last one's."""

    choices: tuple[RowChoice, ...]
    otherwise: Kernel

    def choose(self, rows: int) -> RowChoice:
        """The choice for a step of ``rows`` rows."""
        for choice in self.choices:
            if rows <= choice.max_rows:
                return choice
        return RowChoice(rows, rows, self.otherwise)

    def __str__(self) -> str:
        """Short and equal for equal plans: part of a replica's numeric class."""
        steps = [f"{c.max_rows}:{c.kernel.value}@{c.min_rows}" for c in self.choices]
        return ",".join([*steps, self.otherwise.value])


PLAIN_ROWS = RowPlan((), Kernel.PLAIN)
"""What ``F.linear`` does anyway."""

UNIFORM_ROWS = RowPlan((RowChoice(3, 4, Kernel.PACKED),), Kernel.PACKED)
"""Every row on the packed kernel, so that its bits do not depend on the rows beside it.

One row alone takes another code path in oneDNN (weights with many columns differ in the last bit),
and four to six rows cost less than two or three.
"""

Costs = Mapping[Kernel, Mapping[int, float]]
"""Seconds of one pass over all weights, by kernel and row count."""


def plan_rows(costs: Costs, *, margin: float = 0.15) -> RowPlan:
    """The cheapest kernel and padding for each measured row count.

    Kernels are preferred in the order packed, weight_first, plain, and fewer rows before padding:
    a later candidate must beat an earlier one by ``margin``, so that noise in the measurement does
    not change a replica's numerics from one start to the next. Every kernel in ``costs`` must have
    been measured at the same row counts.
    """
    kernels = [kernel for kernel in _PREFERENCE if kernel in costs]
    measured = sorted(costs[kernels[0]])
    choices: list[RowChoice] = []
    previous = 0
    for rows in measured:
        candidates = [(k, r) for r in measured if r >= rows for k in kernels]
        kernel, padded = candidates[0]
        for other, other_rows in candidates[1:]:
            if costs[other][other_rows] < costs[kernel][padded] * (1 - margin):
                kernel, padded = other, other_rows
        choices.append(RowChoice(rows, padded if padded > rows else previous + 1, kernel))
        previous = rows
    return _simplified(choices)


def _simplified(choices: Sequence[RowChoice]) -> RowPlan:
    """Join neighbours that treat all their rows alike, and drop what the end covers."""
    joined: list[RowChoice] = []
    for choice in choices:
        last = joined[-1] if joined else None
        if last is not None and last.kernel is choice.kernel and _pad_alike(last, choice):
            joined[-1] = RowChoice(choice.max_rows, last.min_rows, choice.kernel)
        else:
            joined.append(choice)
    otherwise = joined[-1].kernel
    covered = joined[-2].max_rows + 1 if len(joined) > 1 else 1
    if joined[-1].min_rows <= covered:
        joined.pop()
    return RowPlan(tuple(joined), otherwise)


def _pad_alike(low: RowChoice, high: RowChoice) -> bool:
    """Whether ``low.min_rows`` pads the rows of ``high`` as ``high`` itself does."""
    behind = low.max_rows + 1
    return low.min_rows == high.min_rows or max(low.min_rows, high.min_rows) <= behind


def usable_kernels(sample: Linear, *, tolerance: float = 1e-3) -> frozenset[Kernel]:
    """Kernels whose result on ``sample`` equals ``F.linear``'s, relative to its largest value.

    ``packed`` is tried only where ``sample`` has a packed copy.
    """
    generator = torch.Generator().manual_seed(0)
    usable = {Kernel.PLAIN}
    for kernel in (Kernel.WEIGHT_FIRST, Kernel.PACKED):
        if kernel is Kernel.PACKED and sample.packed is None:
            continue
        errors = []
        for rows in (1, 2, 3, 5, 16, 33):
            x = torch.randn(rows, sample.weight.shape[1], generator=generator)
            x = x.to(sample.weight.dtype)
            expected = functional.linear(x, sample.weight, sample.bias)
            error = (sample.apply(x, kernel) - expected).abs().max() / expected.abs().max()
            errors.append(error.item())
        if max(errors) <= tolerance:
            usable.add(kernel)
    return frozenset(usable)


def measure_costs(
    layers: Sequence[Sequence[Linear]],
    head: Linear,
    kernels: frozenset[Kernel],
    *,
    sample_layers: int = 6,
    repeats: int = 3,
) -> Costs:
    """CPU time of one pass over all weights, extrapolated from ``sample_layers`` and the head.

    The sample should not fit the last-level cache. Measured on one thread by that thread's own
    clock, which stands still while other processes have the core: wall time on a busy machine
    chooses at random. Sets torch's threads to 1 meanwhile.
    """
    sample = [weight for layer in layers[:sample_layers] for weight in layer]
    scale = len(layers) / len(layers[:sample_layers])
    best = {kernel: dict.fromkeys(MEASURED_ROWS, float("inf")) for kernel in kernels}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            for rows in MEASURED_ROWS:
                inputs = _inputs([*sample, head], rows)
                for kernel in kernels:
                    body = _time_pass(sample, inputs, kernel) * scale
                    total = body + _time_pass([head], inputs, kernel)
                    best[kernel][rows] = min(best[kernel][rows], total)
    finally:
        torch.set_num_threads(threads)
    return best


def _inputs(weights: Sequence[Linear], rows: int) -> dict[int, torch.Tensor]:
    """Activations by the number of columns that a weight takes."""
    columns = {weight.weight.shape[1] for weight in weights}
    like = weights[0].weight
    return {n: torch.randn(rows, n, dtype=like.dtype, device=like.device) for n in columns}


def _time_pass(
    weights: Sequence[Linear], inputs: Mapping[int, torch.Tensor], kernel: Kernel
) -> float:
    start = time.thread_time()
    for weight in weights:
        weight.apply(inputs[weight.weight.shape[1]], kernel)
    return time.thread_time() - start


def pack_all(weights: Sequence[Linear], budget_bytes: int) -> bool:
    """Pack every weight if all copies fit ``budget_bytes`` and PyTorch can; whether it did."""
    if sum(weight.nbytes for weight in weights) > budget_bytes:
        return False
    try:
        for weight in weights:
            weight.pack()
    except RuntimeError:  # no such operator in this build, or not for this dtype on this CPU
        unpack_all(weights)
        return False
    return True


def unpack_all(weights: Sequence[Linear]) -> None:
    """Free the packed copies."""
    for weight in weights:
        weight.packed = None
