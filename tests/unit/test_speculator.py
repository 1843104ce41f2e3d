"""The engine's view: plans and settlements over real suffix drafters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable
from rakv_cluster.speculation.decision import Reason
from rakv_cluster.speculation.seats import Seat
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.speculation.verification import judge_block
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.speculation import NO_RULE

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


class SlowThinking(ManualClock):
    """Every look at the clock takes a millisecond."""

    def monotonic_s(self) -> float:
        self.advance(1e-3)
        return super().monotonic_s()


def speculator(clock: ManualClock | None = None) -> Speculator:
    table = CostTable(CostBuckets())
    for rows in (1, 2, 3, 4, 8, 16):
        table.observe(CostSample(rows, 256, 1, 30.0 + rows))
    return Speculator(table, ControllerSettings(), clock or ManualClock())


def decode(
    subject: Speculator, mode: SpeculationMode, truth: list[int]
) -> Counter[tuple[int, int]]:
    """A request for which the model says ``truth``; its steps by (drafts, accepted)."""
    prompt = [*PHRASE, 1, 2, 3]
    sequence = subject.begin(
        mode, np.array(prompt), NO_RULE, prefill_ms=500.0, tokens_left=len(truth)
    )
    blocks: Counter[tuple[int, int]] = Counter()
    done = 0
    while done < len(truth):
        left = len(truth) - done
        seat = Seat(sequence, np.array(prompt + truth[:done]), left - 1)
        plan = subject.plan([seat])
        (drafts,) = plan.drafts
        chosen = truth[done : done + len(drafts) + 1]
        verdict = judge_block(drafts, chosen, tokens_left=left, stop_token_ids=frozenset())
        subject.settle(plan, [verdict], forward_ms=31.0 + len(drafts))
        blocks[len(drafts), verdict.accepted] += 1
        done += verdict.emitted
    subject.finish(sequence, np.array(prompt + truth))
    return blocks


def drafted(blocks: Counter[tuple[int, int]]) -> Counter[int]:
    """Steps by number of drafts."""
    steps: Counter[int] = Counter()
    for (drafts, _), count in blocks.items():
        steps[drafts] += count
    return steps


def test_a_copied_phrase_is_drafted() -> None:
    blocks = decode(speculator(), "auto", PHRASE * 10)

    assert sum(accepted * steps for (_, accepted), steps in blocks.items()) > 60
    assert max(drafted(blocks)) == 15


@pytest.mark.parametrize("mode", ["1", "2", "4", "8"])
def test_a_fixed_number_of_drafts_is_taken_wherever_there_are_guesses(
    mode: SpeculationMode,
) -> None:
    blocks = decode(speculator(), mode, PHRASE * 20)

    assert set(drafted(blocks)) <= set(range(int(mode) + 1))
    assert drafted(blocks)[int(mode)] >= 5


def test_off_neither_guesses_nor_learns() -> None:
    subject = speculator()

    blocks = decode(subject, "off", PHRASE * 5)

    assert drafted(blocks) == {0: 40}
    assert subject.report(context_tokens=100).acceptance_by_position[0] == 0.0
    assert subject.report(context_tokens=100).requests == 0


def test_k_0_keeps_learning() -> None:
    subject = Speculator(CostTable(CostBuckets()), ControllerSettings(), ManualClock())
    subject.table.observe(CostSample(1, 256, 1, 30.0))  # wider steps were never measured

    decode(subject, "auto", PHRASE * 5)

    report = subject.report(context_tokens=100)
    assert report.steps_by_drafts == {0: 40}
    assert report.acceptance_by_position[0] > 0.5


def test_the_report_adds_up() -> None:
    subject = speculator()
    for _ in range(3):
        decode(subject, "auto", PHRASE * 10)

    report = subject.report(context_tokens=100)

    assert report.requests == 3
    assert sum(report.steps_by_reason.values()) == sum(report.steps_by_drafts.values())
    assert report.steps_by_reason[Reason.DRAFTED.value] > 0
    assert report.overspend_share < -0.5
    assert report.arms[0].cost_ratio == 1.0
    assert report.best_fixed_drafts > 0
    assert 0.0 <= report.decision_accuracy <= 1.0
    assert report.base_ms == pytest.approx(31.0)


def test_a_rest_does_not_take_the_drafts_of_those_who_asked_for_them() -> None:
    subject = speculator(SlowThinking())
    tokens = np.array(PHRASE * 3)
    asked = subject.begin("4", tokens, NO_RULE, prefill_ms=0.0, tokens_left=9)
    broke = subject.begin("auto", tokens, NO_RULE, prefill_ms=0.0, tokens_left=9)
    broke.state.ledger.overspend_ms = 1_000.0
    plan = subject.plan([Seat(broke, tokens, 8)])
    verdict = judge_block((), (99,), tokens_left=9, stop_token_ids=frozenset())
    subject.settle(plan, [verdict], forward_ms=31.0)

    assert subject.rests([Seat(broke, tokens, 8)])
    assert not subject.rests([Seat(broke, tokens, 8), Seat(asked, tokens, 8)])
    together = subject.plan([Seat(broke, tokens, 8), Seat(asked, tokens, 8)])

    assert [len(drafts) for drafts in together.drafts] == [0, 4]


def test_where_no_drafts_can_be_priced_decode_steps_are_left_alone() -> None:
    table = CostTable(CostBuckets())
    table.observe(CostSample(1, 256, 1, 30.0))
    subject = Speculator(table, ControllerSettings(), SlowThinking())
    tokens = np.array(PHRASE * 3)
    sequence = subject.begin("auto", tokens, NO_RULE, prefill_ms=0.0, tokens_left=9)
    seat = Seat(sequence, tokens, 8)
    for _ in range(2):  # the first asks the drafter and finds it slow
        plan = subject.plan([seat])
        verdict = judge_block((), (99,), tokens_left=9, stop_token_ids=frozenset())
        subject.settle(plan, [verdict], forward_ms=30.0)

    assert not plan.asked
    assert subject.rests([seat])
