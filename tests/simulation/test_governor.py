"""The governor's promises against adversarial drafters, in virtual time."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence

import pytest

from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample
from rakv_cluster.speculation.decision import Reason
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.speculation import (
    Guess,
    Script,
    SimulatedReplica,
    SimulatedStep,
    StepTime,
)

WINDOW_TOKENS = 1_000

# ms by rows: 2 CPU threads with packed and with plain weights (DESIGN.md section 3), a loaded
# replica, and a GPU.
COSTS: dict[str, dict[int, float]] = {
    "packed": {1: 32.5, 2: 37.0, 3: 42.8, 4: 48.6, 8: 52.4, 16: 60.0},
    "plain": {1: 32.5, 2: 36.0, 3: 40.7, 4: 71.7, 8: 92.5, 16: 137.0},
    "loaded": {1: 32.5, 2: 42.2, 3: 52.0, 4: 61.7, 8: 100.0, 16: 178.0},
    "gpu": {1: 10.0, 2: 10.1, 3: 10.2, 4: 10.3, 8: 10.7, 16: 11.5},
}

SCRIPTS: dict[str, Script] = {
    "always wrong": lambda position: Guess(15, 0),
    "always right": lambda position: Guess(15, 15),
    "alternating": lambda position: Guess(15, 15 * (position % 2)),
    "right, then wrong forever": lambda position: Guess(15, 15 if position < 200 else 0),
    "wrong, each time behind another match": lambda position: Guess(
        15, 0, match_tokens=2 + position % 60
    ),
    "right for one token": lambda position: Guess(15, 1),
    "slow and wrong": lambda position: Guess(15, 0, draft_ms=3.0),
    "slow and right": lambda position: Guess(15, 15, draft_ms=3.0),
}


def table(costs: dict[int, float]) -> StepTime:
    return lambda rows, batch: costs[min(edge for edge in costs if edge >= rows)]


ROWS = CostBuckets(rows=(1, 2, 3, 4, 8, 16))


def replica(costs: str, mode: GovernorMode = GovernorMode.BUCKET) -> SimulatedReplica:
    settings = ControllerSettings(governor=GovernorSettings(mode))
    subject = SimulatedReplica(table(COSTS[costs]), settings, ROWS)
    subject.seed_costs()
    return subject


def loss(steps: Sequence[SimulatedStep]) -> float:
    """Share of plain time that was lost over these steps; negative if time was saved."""
    plain_ms = sum(step.plain_time_ms for step in steps)
    return sum(step.ms for step in steps) / plain_ms - 1


def worst_window(steps: Sequence[SimulatedStep]) -> float:
    """Largest loss over any run of steps that just emits 1,000 tokens."""
    tokens = [0, *itertools.accumulate(step.tokens for step in steps)]
    ms = [0.0, *itertools.accumulate(step.ms for step in steps)]
    plain_ms = [0.0, *itertools.accumulate(step.plain_time_ms for step in steps)]
    worst = -1.0
    for first in range(len(steps)):
        last = bisect_left(tokens, tokens[first] + WINDOW_TOKENS)
        if last <= len(steps):
            worst = max(worst, (ms[last] - ms[first]) / (plain_ms[last] - plain_ms[first]) - 1)
    return worst


def oracle_ms(costs: dict[int, float], tokens: int) -> float:
    """Least time for so many tokens when every draft is right."""
    return min(
        -(-tokens // drafts_and_one) * table(costs)(drafts_and_one, 1)
        for drafts_and_one in range(1, 17)
    )


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_default_loses_little_over_1000_tokens_and_on_one_request(costs: str, script: str) -> None:
    subject = replica(costs)
    requests = [subject.run([SCRIPTS[script]], output_tokens=128) for _ in range(12)]

    assert max(loss(steps) for steps in requests) <= 0.05
    assert worst_window([step for steps in requests for step in steps]) <= 0.01


class SlowThinking(ManualClock):
    """Every look at the clock takes 50 us: deciding costs 4% of a step of 5 ms."""

    def monotonic_s(self) -> float:
        self.advance(5e-5)
        return super().monotonic_s()


@pytest.mark.parametrize("mode", [GovernorMode.BUCKET, GovernorMode.STRICT])
@pytest.mark.parametrize("script", SCRIPTS)
def test_deciding_itself_is_paid_for(script: str, mode: GovernorMode) -> None:
    costs = {rows: ms / 2 for rows, ms in COSTS["gpu"].items()}
    settings = ControllerSettings(governor=GovernorSettings(mode))
    subject = SimulatedReplica(table(costs), settings, ROWS, SlowThinking())
    subject.seed_costs()

    requests = [subject.run([SCRIPTS[script]], output_tokens=128) for _ in range(20)]

    share = 0.05 if mode is GovernorMode.BUCKET else 0.01
    # What one more decision takes is known only when it has been taken.
    surprise = 2 * 4 * 5e-5 * 1e3 / (128 * costs[1])
    assert max(loss(steps) for steps in requests) <= share + surprise
    if mode is GovernorMode.BUCKET:
        assert worst_window([step for steps in requests for step in steps]) <= 0.01


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("output_tokens", [128, 600])
def test_strict_loses_at_most_1_percent_on_every_request(
    costs: str, script: str, output_tokens: int
) -> None:
    subject = replica(costs, GovernorMode.STRICT)

    for _ in range(3):
        assert loss(subject.run([SCRIPTS[script]], output_tokens=output_tokens)) <= 0.01


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("output_tokens", "share"), [(128, 0.6), (600, 0.9)])
def test_a_drafter_that_is_always_right_gains_most_of_what_an_oracle_would(
    costs: str, output_tokens: int, share: float
) -> None:
    subject = replica(costs)

    steps = subject.run([SCRIPTS["always right"]], output_tokens=output_tokens)

    plain_ms = sum(step.plain_time_ms for step in steps)
    possible_ms = plain_ms - oracle_ms(COSTS[costs], output_tokens)
    assert plain_ms - sum(step.ms for step in steps) >= share * possible_ms


def test_without_a_governor_an_adversary_costs_more_and_a_friend_gains_more() -> None:
    adverse = loss(replica("gpu", GovernorMode.THROUGHPUT).run(
        [SCRIPTS["slow and wrong"]], output_tokens=128
    ))  # fmt: skip
    friendly = loss(replica("gpu", GovernorMode.THROUGHPUT).run(
        [SCRIPTS["slow and right"]], output_tokens=128
    ))  # fmt: skip

    assert adverse > 0.05
    assert friendly < loss(replica("gpu").run([SCRIPTS["slow and right"]], output_tokens=128))


def test_a_draft_model_that_never_pays_is_found_out() -> None:
    # The paper's pairs: break-even at 89-97% acceptance. Here 0.9 of a plain step per draft.
    subject = SimulatedReplica(lambda rows, batch: 30.0 * (1 + 0.9 * (rows - 1)))
    subject.seed_costs()
    random_source = random.Random(7)

    steps = subject.run(
        [lambda position: Guess(15, int(random_source.random() < 0.8))], output_tokens=600
    )

    drafted = sum(step.reason is Reason.DRAFTED for step in steps)
    assert drafted <= 0.02 * len(steps)  # an old measurement is doubted, tried again, confirmed
    assert loss(steps) <= 0.005
    report = subject.speculator.report(context_tokens=256)
    assert report.arms[1].break_even_acceptance == pytest.approx(0.9)
    assert report.decision_accuracy == 1.0
    assert report.best_fixed_drafts == 0


@pytest.mark.parametrize("script", ["always right", "alternating", "right for one token"])
def test_the_ledger_grants_what_plain_steps_take_at_every_context(script: str) -> None:
    """Attention makes a step longer by its context; hardly a step is plain, and none was
    measured near most of these contexts."""
    subject = SimulatedReplica(table(COSTS["packed"]), buckets=ROWS, context_ms=0.006)
    subject.seed_costs(contexts=(64, 2048))
    ledger = subject.speculator.replica.ledger

    for prompt_tokens in (540, 30, 290, 1_100, 700, 1_600, 150):
        booked_ms = ledger.plain_ms
        steps = subject.run([SCRIPTS[script]], output_tokens=128, prompt_tokens=prompt_tokens)

        true_ms = sum(step.plain_time_ms for step in steps)
        assert ledger.plain_ms - booked_ms == pytest.approx(true_ms, rel=0.01)


def test_costs_that_were_mismeasured_are_found_out() -> None:
    deceived, honest = replica("loaded"), replica("loaded")
    for rows in (2, 3, 4, 8, 16):
        for _ in range(50):
            deceived.speculator.table.observe(CostSample(rows, 256, 1, 32.5))
    script = SCRIPTS["right for one token"]

    steps = deceived.run([script], output_tokens=2_000)

    expected = loss(honest.run([script], output_tokens=2_000)[-500:])
    assert loss(steps[-500:]) == pytest.approx(expected, abs=0.02)


def test_a_wide_step_that_was_measured_under_load_is_tried_again() -> None:
    subject = replica("packed")
    for rows in (2, 3, 4, 8, 16):
        for _ in range(50):
            subject.speculator.table.observe(CostSample(rows, 256, 1, 32.5 * 4))

    steps = subject.run([SCRIPTS["right for one token"]], output_tokens=6_000)

    # With true costs one right draft saves 41% of the time.
    assert loss(steps[-500:]) < -0.35


def test_noise_and_stalls_do_not_turn_a_gain_into_a_loss() -> None:
    noise = random.Random(3)
    true_ms = table(COSTS["packed"])

    def noisy(rows: int, batch: int) -> float:
        stall = 20.0 if noise.random() < 0.02 else 1.0
        return true_ms(rows, batch) * noise.lognormvariate(0, 0.1) * stall

    subject = SimulatedReplica(noisy, buckets=ROWS)
    for _ in range(5):
        subject.seed_costs()

    steps = subject.run([SCRIPTS["alternating"]], output_tokens=2_000)

    tokens_per_step = sum(step.tokens for step in steps) / len(steps)
    assert tokens_per_step > 10
