"""Text or model: whose drafts a sequence gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable
from rakv_cluster.speculation.draft_rounds import DraftState, DraftWish
from rakv_cluster.speculation.drafters import Draft
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.speculation.seats import Seat, Speculation
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.speculation.verification import judge_block
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.speculation import NO_RULE

PROMPT = [1, 2, 3]
LOOP = [10, 11, 12, 13, 14] * 40
# Behind 7 the text guesses what came behind it last time, which never comes again.
MISLEADING = [token for index in range(100) for token in (7, 100 + index)]
UNBOUNDED = ControllerSettings(governor=GovernorSettings(GovernorMode.THROUGHPUT))


@dataclass
class Oracle:
    """A model that knows the text; a draft takes a fifth more than ``round_ms``."""

    text: Sequence[int]
    clock: ManualClock = field(default_factory=ManualClock)
    round_ms: float = 5.0
    agreement: float = 0.8
    fails: bool = False
    asked: int = 0
    closed: list[DraftState] = field(default_factory=list)

    def catch_up_ms(self, state: DraftState) -> float:
        return 0.0

    def can_draft(self, wish: DraftWish) -> bool:
        return True

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        self.asked += 1
        if self.fails:
            raise RuntimeError("out of memory")
        self.clock.advance(max(wish.drafts for wish in wishes) * 1.2 * self.round_ms / 1e3)
        done = [len(wish.state.ids) for wish in wishes]
        return [
            Draft(tuple(self.text[at : at + wish.drafts]))
            for at, wish in zip(done, wishes, strict=True)
        ]

    def close(self, state: DraftState) -> None:
        self.closed.append(state)


def decode(
    model: Oracle,
    truth: Sequence[int],
    *,
    mode: SpeculationMode = "auto",
    settings: ControllerSettings = UNBOUNDED,
    prefill_ms: float = 0.0,
) -> Speculation:
    """A request for which the target says ``truth``, 30 ms a step and little more with drafts."""
    table = CostTable(CostBuckets())
    for rows in (1, 2, 3, 4, 6, 8, 12, 16):
        table.observe(CostSample(rows, 256, 1, 30.0 + 0.1 * rows))
    subject = Speculator(table, settings, model.clock, draft_model=model)
    sequence = subject.begin(mode, np.array(PROMPT), NO_RULE, prefill_ms=prefill_ms, tokens_left=99)
    done = 0
    while done < len(truth):
        left = len(truth) - done
        seat = Seat(sequence, np.array([*PROMPT, *truth[:done]]), left - 1)
        if subject.rests([seat]):
            done += 1
            continue
        plan = subject.plan([seat])
        (drafts,) = plan.drafts
        chosen = truth[done : done + len(drafts) + 1]
        verdict = judge_block(drafts, chosen, tokens_left=left, stop_token_ids=frozenset())
        subject.settle(plan, [verdict], forward_ms=30.0 + 0.1 * (1 + len(drafts)))
        done += verdict.emitted
    subject.finish(sequence, np.array([*PROMPT, *truth]))
    return sequence


def test_a_model_takes_over_from_a_text_that_misleads() -> None:
    model = Oracle([*PROMPT, *MISLEADING])

    sequence = decode(model, MISLEADING)

    assert sequence.model_drafts > 150
    assert sequence.text_drafts < 20
    assert model.closed == [sequence.model]


def test_a_model_is_left_alone_where_the_text_is_as_good_and_free() -> None:
    model = Oracle([*PROMPT, *LOOP])

    sequence = decode(model, LOOP)

    # Nothing to guess from before the loop closes.
    assert sequence.model_drafts < 20
    assert sequence.text_drafts > 150


def test_a_request_that_cannot_afford_the_model_drafts_from_its_text() -> None:
    dear = Oracle([*PROMPT, *LOOP], round_ms=29.0)

    bounded = decode(dear, LOOP, settings=ControllerSettings())

    assert bounded.text_drafts > 100
    assert bounded.model_drafts == 0


def test_a_fixed_number_of_drafts_comes_from_the_text_where_it_offers_any() -> None:
    model = Oracle([*PROMPT, *MISLEADING])

    sequence = decode(model, MISLEADING, mode="4")

    assert sequence.text_drafts > 50  # behind every 7
    assert sequence.model_drafts > 0


def test_a_model_that_fails_is_not_asked_again() -> None:
    model = Oracle([*PROMPT, *MISLEADING], fails=True)

    sequence = decode(model, MISLEADING)

    assert model.asked == 1
    assert sequence.model_drafts == 0


def test_a_model_s_drafts_are_no_deciding_that_a_rest_would_have_to_pay_for() -> None:
    model = Oracle([*PROMPT, *MISLEADING], round_ms=10.0)

    sequence = decode(
        model, MISLEADING, mode="trace", settings=ControllerSettings(), prefill_ms=100.0
    )

    # The first draft takes all that the request may lose by then.
    reasons = [step.reason for step in sequence.trace]
    assert "rested" not in reasons[reasons.index("drafted") :]
    assert sequence.model_drafts > 100
