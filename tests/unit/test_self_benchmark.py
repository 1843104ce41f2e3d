"""Seeding the cost table: which shapes are run, and what is reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.model.step import Step
from rakv_cluster.speculation.cost_files import CostIdentity
from rakv_cluster.speculation.self_benchmark import BenchmarkPlan, measure_costs, seeded_costs
from rakv_cluster.testing import ManualClock


@dataclass
class TimedRunner:
    """Checks a step's shape and lets it take 10 ms and 1 ms per row, 100 ms more every 7th time."""

    clock: ManualClock
    context_tokens: int = 4_096
    seen: Counter[tuple[int, int]] = field(default_factory=Counter)
    layout: KvLayout = field(default_factory=lambda: KvLayout(1, 1, 2, "float32"))
    vocab_size: int = 5
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def forward(self, step: Step) -> torch.Tensor:
        (span,) = step.spans
        rows = len(step.token_ids)
        assert span.last_position < self.context_tokens
        assert span.last_position - span.first_position + 1 == rows == span.row_stop
        assert span.buffer.capacity > span.last_position
        assert int(step.token_ids.max()) < self.vocab_size
        self.seen[rows, span.last_position + 1] += 1
        stall_ms = 100 if sum(self.seen.values()) % 7 == 0 else 0
        self.clock.advance((10 + rows + stall_ms) / 1e3)
        return torch.zeros(len(step.logit_rows), self.vocab_size)


def test_reports_the_best_round_of_every_shape() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)
    plan = BenchmarkPlan(rows=(1, 2, 4), context_tokens=(64, 512), rounds=5)

    samples = measure_costs(runner, plan, clock)

    assert {(s.rows, s.context_tokens, s.batch): s.ms for s in samples} == {
        (rows, context, 1): pytest.approx(10 + rows) for rows in (1, 2, 4) for context in (64, 512)
    }
    assert set(runner.seen.values()) == {6}  # one to warm up, five timed


def test_stops_beginning_rounds_when_its_time_is_up_but_measures_once() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)

    samples = measure_costs(runner, BenchmarkPlan(rows=(1, 2), budget_s=0.0), clock)

    assert len(samples) == 6
    assert set(runner.seen.values()) == {2}


def test_contexts_are_cut_to_what_the_model_has() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock, context_tokens=12)

    samples = measure_costs(runner, BenchmarkPlan(rows=(1, 16)), clock)

    assert [(s.rows, s.context_tokens) for s in samples] == [(1, 12)]


def test_costs_are_measured_once_per_machine_and_model(tmp_path: Path) -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)
    identity = CostIdentity("machine", "ab" * 32, "cpu")

    first = seeded_costs(runner, identity, cache_dir=tmp_path, clock=clock)
    forwards = sum(runner.seen.values())
    second = seeded_costs(runner, identity, cache_dir=tmp_path, clock=clock)

    assert sum(runner.seen.values()) == forwards
    assert second.to_json() == first.to_json()
    assert first.step_costs(batch=1, context_tokens=100).at(8) == pytest.approx(18.0)


def test_a_folder_that_cannot_be_written_costs_no_start(tmp_path: Path) -> None:
    clock = ManualClock()
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    identity = CostIdentity("machine", "ab" * 32, "cpu")

    table = seeded_costs(TimedRunner(clock), identity, cache_dir=blocked, clock=clock)

    assert not table.is_empty
