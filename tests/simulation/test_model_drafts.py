"""Drafts by a model, which cost a forward each, in virtual time: as good as the best fixed number,
also on short answers; and other load on the machine is not taken for their doing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.speculation.speculator import SpeculationMode
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.speculation import (
    Guess,
    Script,
    ScriptedModel,
    SimulatedReplica,
    SimulatedStep,
)

PLAIN_MS = 18.0

# ms of a step by rows over one row: native kernels on two threads (docs/experiments.md).
COSTS = {1: 1.0, 2: 1.05, 3: 1.09, 4: 1.14, 6: 1.22, 8: 1.38, 12: 1.62, 16: 1.9}

WARM_REQUESTS = 10
FIXED: tuple[SpeculationMode, ...] = ("off", "1", "2", "4", "8")


def nothing(position: int) -> Guess:
    """A text that never offers anything."""
    return Guess(0, 0)


def repeats(position: int) -> Guess:
    """A text that offers eight right tokens wherever as many new ones came before."""
    return Guess(8, 8) if position % 16 == 8 else Guess(0, 0)


class Serving:
    """One replica: its model's drafts are right with one chance each, its text offers ``text``."""

    def __init__(
        self,
        right: float,
        draft_share: float,
        mode: GovernorMode = GovernorMode.BUCKET,
        *,
        knows: bool = False,
        text: Script = nothing,
    ) -> None:
        """A draft takes ``draft_share`` of a plain step; the model ``knows`` which of its drafts
        are doubtful: those that are wrong, and as many that are right."""
        self.slowness = 1.0
        self.stall_s = 0.0
        self.right = right
        self._text = text
        self._chance = random.Random(1)
        self._truths: list[bool] = []
        self._doubts: list[bool] = []
        self._clock = clock = ManualClock()
        model = ScriptedModel(
            self._is_right,
            clock,
            round_ms=draft_share * PLAIN_MS,
            confidence=self._confidence if knows else None,
        )
        self._replica = SimulatedReplica(
            lambda rows, batch: self.slowness * PLAIN_MS * self._over_one_row(rows),
            ControllerSettings(governor=GovernorSettings(mode)),
            clock=clock,
            draft_model=model,
        )
        self._replica.seed_costs()

    def _is_right(self, position: int) -> bool:
        """Asked while the model drafts, which may stall once."""
        self._clock.advance(self.stall_s)
        self.stall_s = 0.0
        return self._truths[position]

    def _confidence(self, position: int) -> float:
        return 0.25 if not self._truths[position] or self._doubts[position] else 0.95

    def _over_one_row(self, rows: int) -> float:
        return COSTS[min(edge for edge in COSTS if edge >= min(rows, max(COSTS)))]

    def answer(self, tokens: int, mode: SpeculationMode = "auto") -> list[SimulatedStep]:
        """One request behind a prompt that came from the cache."""
        wrong = 1 - self.right
        self._truths = [self._chance.random() < self.right for _ in range(2 * tokens)]
        self._doubts = [self._chance.random() < wrong for _ in range(2 * tokens)]
        return self._replica.run(
            [self._text],
            output_tokens=tokens,
            prompt_tokens=256,
            prefill_ms=2 * PLAIN_MS,
            mode=mode,
        )


def spent_ms(steps: Sequence[SimulatedStep]) -> float:
    return sum(step.ms for step in steps)


def loss(steps: Sequence[SimulatedStep]) -> float:
    """Share of plain time, prefill included, that was lost."""
    plain_ms = sum(step.plain_time_ms for step in steps)
    return (spent_ms(steps) - plain_ms) / (plain_ms + 2 * PLAIN_MS)


@pytest.mark.parametrize(
    ("right", "draft_share", "tokens"),
    [
        (0.95, 0.25, 32),
        (0.95, 0.4, 32),
        (0.95, 0.4, 96),
        (0.8, 0.4, 96),
        (0.8, 0.55, 32),
        (0.05, 0.3, 32),
    ],
)
def test_adapting_is_as_good_as_the_best_fixed_number(
    right: float, draft_share: float, tokens: int
) -> None:
    def total_ms(mode: SpeculationMode) -> float:
        serving = Serving(right, draft_share)
        answers = [serving.answer(tokens, mode) for _ in range(WARM_REQUESTS + 80)]
        return sum(spent_ms(steps) for steps in answers[WARM_REQUESTS:])

    best_ms = min(total_ms(mode) for mode in FIXED)

    assert total_ms("auto") <= 1.02 * best_ms


@pytest.mark.parametrize(("right", "draft_share"), [(0.7, 0.4), (0.8, 0.4), (0.8, 0.55)])
def test_a_model_that_knows_when_it_is_unsure_beats_every_fixed_number(
    right: float, draft_share: float
) -> None:
    def total_ms(mode: SpeculationMode) -> float:
        serving = Serving(right, draft_share, knows=True)
        answers = [serving.answer(96, mode) for _ in range(WARM_REQUESTS + 40)]
        return sum(spent_ms(steps) for steps in answers[WARM_REQUESTS:])

    best_ms = min(total_ms(mode) for mode in FIXED)

    assert total_ms("auto") <= 0.95 * best_ms


@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 0.95])
def test_no_answer_of_the_usual_length_loses_more_than_its_share(right: float) -> None:
    serving = Serving(right, 0.4)

    for _ in range(60):
        assert loss(serving.answer(32)) <= 0.05


@pytest.mark.parametrize("slowness", [2.0, 4.0])
def test_a_burst_of_other_load_does_not_end_drafting(slowness: float) -> None:
    serving, undisturbed = Serving(0.95, 0.3), Serving(0.95, 0.3)
    for subject in (serving, undisturbed):
        for _ in range(WARM_REQUESTS):
            subject.answer(96)
    serving.slowness = slowness
    for _ in range(3):
        serving.answer(96)
    serving.slowness = 1.0
    serving.answer(96)

    after_ms = sum(spent_ms(serving.answer(96)) for _ in range(20))

    expected_ms = sum(spent_ms(undisturbed.answer(96)) for _ in range(20))
    assert after_ms <= 1.05 * expected_ms


@pytest.mark.parametrize("right", [0.0, 0.3, 0.5])
def test_what_a_model_cannot_be_paid_for_keeps_nobody_from_the_text(right: float) -> None:
    serving = Serving(right, 0.6, text=repeats)

    for _ in range(3):
        steps = serving.answer(48)

        assert sum(step.emitted[0] > 4 for step in steps) >= 2  # of three repetitions


@pytest.mark.parametrize("slowness", [5.0, 10.0])
@pytest.mark.parametrize("right", [0.8, 0.9])
def test_what_was_lost_in_slow_steps_does_not_keep_quick_ones_from_drafting(
    right: float, slowness: float
) -> None:
    serving = Serving(right, 0.5, text=repeats)
    for _ in range(20):
        serving.answer(48)
    before_ms = sum(spent_ms(serving.answer(48)) for _ in range(20))
    serving.right, serving.slowness = 0.0, slowness
    for _ in range(6):
        serving.answer(48)
    serving.right, serving.slowness = right, 1.0

    after_ms = sum(spent_ms(serving.answer(48)) for _ in range(20))

    assert after_ms <= 1.1 * before_ms  # 1.5 times without drafts


def test_a_stall_while_a_model_drafts_does_not_end_drafting() -> None:
    serving, undisturbed = Serving(0.9, 0.4), Serving(0.9, 0.4)
    for subject in (serving, undisturbed):
        for _ in range(WARM_REQUESTS):
            subject.answer(48)
    serving.stall_s = 2.0
    for subject in (serving, undisturbed):
        subject.answer(48)

    after_ms = sum(spent_ms(serving.answer(48)) for _ in range(20))

    assert after_ms <= 1.02 * sum(spent_ms(undisturbed.answer(48)) for _ in range(20))
