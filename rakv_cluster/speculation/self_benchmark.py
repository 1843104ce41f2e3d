"""Seed the cost table: time a few decode steps of every shape at load."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from rakv_cluster.clock import Clock
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.speculation.cost_files import (
    CostIdentity,
    costs_path,
    load_costs,
    save_costs,
)
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """Shapes to time: every ``rows`` of one sequence at every context.

    Rounds are interleaved over all shapes, and a shape's best round is reported: load only ever
    adds, and it is the ratios between shapes that are kept. The first round is always run; none
    begins after ``budget_s``.
    """

    rows: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    context_tokens: tuple[int, ...] = (64, 512, 2048)
    rounds: int = 5
    budget_s: float = 5.0


def seeded_costs(
    runner: Runner,
    identity: CostIdentity,
    *,
    cache_dir: Path,
    clock: Clock,
    plan: BenchmarkPlan | None = None,
) -> CostTable:
    """What this machine was found to need for this model before, else measured now and kept.

    Measuring blocks the calling thread for some seconds. A folder that cannot be written costs
    the measurement again next time.
    """
    path = costs_path(cache_dir, identity)
    table = load_costs(path, identity, CostBuckets())
    if not table.is_empty:
        return table
    for sample in measure_costs(runner, plan or BenchmarkPlan(), clock):
        table.observe(sample)
    try:
        save_costs(path, identity, table)
    except OSError:
        log.warning("step costs cannot be kept in %s", path, exc_info=True)
    return table


def measure_costs(runner: Runner, plan: BenchmarkPlan, clock: Clock) -> list[CostSample]:
    """Time ``runner.forward`` for the plan's shapes; contexts are cut to what the model has.

    Blocks the calling thread, which must own the runner; uses buffers of its own.
    """
    steps = {
        (rows, context): step
        for context in sorted({min(c, runner.context_tokens) for c in plan.context_tokens})
        for rows, step in _decode_steps(runner, plan.rows, context)
    }
    times_ms: dict[tuple[int, int], list[float]] = {shape: [] for shape in steps}
    began_s = clock.monotonic_s()
    for step in steps.values():
        runner.forward(step)
    for done in range(plan.rounds):
        if done and clock.monotonic_s() - began_s > plan.budget_s:
            break
        for shape, step in steps.items():
            started_s = clock.monotonic_s()
            # argmax waits for the logits, also where the forward only queues kernels.
            runner.forward(step).argmax(dim=-1).cpu()
            times_ms[shape].append((clock.monotonic_s() - started_s) * 1e3)
    return [
        CostSample(rows=rows, context_tokens=context, batch=1, ms=min(times))
        for (rows, context), times in times_ms.items()
        if times
    ]


def _decode_steps(
    runner: Runner, row_counts: tuple[int, ...], context_tokens: int
) -> list[tuple[int, Step]]:
    """Steps of one sequence that end at ``context_tokens``, with logits for all of their rows.

    They share one buffer: what it holds does not change what a step costs.
    """
    layout = runner.layout
    shape = layout.shape(context_tokens)
    buffer = KvBuffer(torch.zeros(shape, dtype=layout.torch_dtype, device=runner.device))
    steps = []
    for rows in row_counts:
        first = context_tokens - rows
        if first < 0:
            continue
        step = Step(
            token_ids=torch.arange(rows) % runner.vocab_size,
            positions=torch.arange(first, context_tokens),
            spans=(Span(buffer, 0, rows, first, context_tokens - 1),),
            logit_rows=torch.arange(rows),
        )
        steps.append((rows, step))
    return steps
