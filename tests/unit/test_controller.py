"""Single decisions: what is chosen, and the reason that is given."""

from __future__ import annotations

import math

import pytest

from rakv_cluster.speculation.arms import ArmCosts
from rakv_cluster.speculation.booking import StepResult, settle
from rakv_cluster.speculation.controller import (
    Candidate,
    ControllerSettings,
    ReplicaState,
    RequestState,
    choose,
    may_draft,
)
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.speculation.decision import Reason
from rakv_cluster.speculation.drafters import Draft
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings

CHEAP = StepCosts((1, 2, 3, 4, 8, 16), (30.0, 30.5, 31.0, 31.5, 33.0, 36.0))
DEAR = StepCosts((1, 2, 4, 8), (30.0, 55.0, 105.0, 205.0))
UNGOVERNED = ControllerSettings(governor=GovernorSettings(GovernorMode.THROUGHPUT))


def request(replica: ReplicaState, *, hit_rate: float | None = None) -> RequestState:
    """A request with 10 s of prefill to its credit, and some history."""
    state = RequestState.begin(replica, prefill_ms=10_000.0)
    for index in range(60 if hit_rate is not None else 0):
        token = 1 if (index + 1) * (hit_rate or 0.0) // 1 > index * (hit_rate or 0.0) // 1 else 2
        emitted = [token] * 16 if token == 1 else [token]
        state.acceptance.open(Draft((1,) * 15, 8), ArmCosts(15, 1.0, ()))
        state.acceptance.follow(emitted)
    return state


def test_likely_drafts_fill_the_widest_rows() -> None:
    replica = ReplicaState()

    decision = choose(
        ControllerSettings(), replica, [Candidate(request(replica, hit_rate=1.0), 15, 8)], CHEAP
    )

    assert decision.drafts == (15,)
    assert decision.reason is Reason.DRAFTED
    assert decision.rows == 16
    assert decision.predicted_ms == 36.0
    assert [option.rows for option in decision.options] == [1, 2, 3, 4, 8, 16]


def test_unlikely_drafts_are_not_worth_it() -> None:
    replica = ReplicaState()

    decision = choose(
        ControllerSettings(), replica, [Candidate(request(replica, hit_rate=0.0), 15, 8)], DEAR
    )

    assert decision.drafts == (0,)
    assert decision.reason is Reason.NOT_WORTH
    assert decision.expected_tokens == 1.0


def test_a_gain_within_the_margin_is_not_taken() -> None:
    replica = ReplicaState()
    candidate = Candidate(request(replica), 1, 8)  # prior: 1.4 tokens
    just_short = StepCosts((1, 2), (30.0, 30.0 * 1.4 / 1.019))
    enough = StepCosts((1, 2), (30.0, 30.0 * 1.4 / 1.021))

    assert choose(UNGOVERNED, replica, [candidate], just_short).reason is Reason.NOT_WORTH
    assert choose(UNGOVERNED, replica, [candidate], enough).reason is Reason.DRAFTED


def test_without_guesses_or_costs_the_step_is_plain() -> None:
    replica = ReplicaState()
    state = request(replica)

    nothing = choose(ControllerSettings(), replica, [Candidate(state, 0)], CHEAP)
    unmeasured = choose(ControllerSettings(), replica, [Candidate(state, 5, 8)], StepCosts())

    assert (nothing.drafts, nothing.reason) == ((0,), Reason.NO_DRAFT)
    assert (unmeasured.drafts, unmeasured.reason) == ((0,), Reason.NO_COSTS)


def test_the_governor_vetoes_what_it_cannot_afford_to_lose() -> None:
    replica = ReplicaState()
    state = RequestState.begin(replica, prefill_ms=0.0)

    decision = choose(ControllerSettings(), replica, [Candidate(state, 1, 8)], CHEAP)
    strict = choose(
        ControllerSettings(governor=GovernorSettings(GovernorMode.STRICT)),
        replica,
        [Candidate(state, 1, 8)],
        CHEAP,
    )

    assert decision.reason is Reason.DRAFTED  # 0.5 ms of the 1.5 ms that 5% of one token allow
    assert strict.reason is Reason.GOVERNED
    assert strict.allowance_ms == pytest.approx(0.3)


def test_drafts_go_to_the_sequences_where_they_are_likeliest() -> None:
    replica = ReplicaState()
    likely, unlikely = request(replica, hit_rate=1.0), request(ReplicaState(), hit_rate=0.0)

    decision = choose(
        ControllerSettings(),
        replica,
        [Candidate(unlikely, 15, 8), Candidate(likely, 15, 8)],
        StepCosts((2, 4, 8), (30.0, 31.0, 300.0)),
    )

    assert decision.drafts == (0, 2)


def test_forced_drafts_are_taken_whatever_they_cost_and_rows_left_are_shared() -> None:
    replica = ReplicaState()
    candidates = [
        Candidate(request(replica), 4, 8, forced=4),
        Candidate(request(replica), 0, 0, forced=4),
        Candidate(request(replica, hit_rate=1.0), 15, 8),
    ]

    decision = choose(ControllerSettings(), replica, candidates, CHEAP)

    assert decision.drafts[:2] == (4, 0)
    assert decision.base_ms == 33.0
    assert decision.drafts[2] == 9  # 3 + 4 rows are given, 16 can be had
    assert choose(ControllerSettings(), replica, candidates[:1], StepCosts()).drafts == (4,)


def test_a_plain_step_is_taken_now_and_then_to_keep_its_cost_fresh() -> None:
    replica, settings = ReplicaState(), ControllerSettings(baseline_interval=3)
    candidates = [Candidate(request(replica, hit_rate=1.0), 15, 8)]
    reasons = []

    for _ in range(8):
        decision = choose(settings, replica, candidates, CHEAP)
        reasons.append(decision.reason)
        settle(settings, replica, candidates, decision, StepResult(30.0, 0.0, 0.0, 0.0, (1,)))

    assert reasons == [*[Reason.DRAFTED] * 3, Reason.BASELINE, *[Reason.DRAFTED] * 3,
                       Reason.BASELINE]  # fmt: skip


def test_deciding_changes_nothing() -> None:
    replica = ReplicaState()
    candidates = [Candidate(request(replica, hit_rate=0.5), 15, 8)]

    first = choose(ControllerSettings(), replica, candidates, CHEAP)

    assert choose(ControllerSettings(), replica, candidates, CHEAP) == first


def test_a_stall_is_not_booked_as_the_price_of_drafting() -> None:
    replica, settings = ReplicaState(), ControllerSettings()
    candidates = [Candidate(request(replica, hit_rate=1.0), 1, 8)]
    decision = choose(settings, replica, candidates, CHEAP)

    settle(settings, replica, candidates, decision, StepResult(60_000.0, 0.0, 0.0, 0.0, (1,)))

    assert replica.ledger.overspend_ms == pytest.approx(1.5 * 30.5 - 30.0)


def test_a_slow_drafter_is_not_asked_until_its_guess_could_be_used() -> None:
    settings, replica = ControllerSettings(), ReplicaState(draft_ms=3.0)
    poor = RequestState.begin(replica, prefill_ms=0.0)
    rich = RequestState.begin(replica, prefill_ms=10_000.0)

    assert not may_draft(settings, replica, [poor], CHEAP)
    assert may_draft(settings, replica, [rich], CHEAP)
    assert may_draft(settings, ReplicaState(draft_ms=0.01), [poor], CHEAP)
    assert may_draft(settings, replica, [poor], StepCosts())


def test_everything_finite_is_explained() -> None:
    replica = ReplicaState()
    decision = choose(ControllerSettings(), replica, [Candidate(request(replica), 3, 8)], CHEAP)

    assert math.isfinite(decision.predicted_ms)
    assert decision.options[0].tokens == 1.0
    chosen = next(option for option in decision.options if option.rows == decision.rows)
    assert (chosen.ms, chosen.tokens) == (decision.predicted_ms, decision.expected_tokens)


def by_model(state: RequestState, round_ms: float) -> Candidate:
    return Candidate(state, 15, by_model=True, round_ms=round_ms)


def test_a_models_drafts_are_weighed_one_by_one() -> None:
    """All rows cost the same here, but each draft takes a round."""
    replica = ReplicaState()
    replica.hazards.assume(0.8)
    flat = StepCosts((1, 16), (30.0, 31.0))

    decision = choose(UNGOVERNED, replica, [by_model(request(replica), 6.0)], flat)

    assert [option.rows for option in decision.options] == list(range(1, 17))
    assert decision.drafts == (4,)


def test_a_model_that_becomes_sure_may_go_on_as_far_as_is_allowed() -> None:
    replica = ReplicaState()
    replica.hazards.assume(0.8)
    flat = StepCosts((1, 16), (30.0, 31.0))
    sure = by_model(request(replica), 6.0)
    forced = Candidate(request(replica), 4, forced=2, by_model=True, round_ms=6.0)

    decision = choose(UNGOVERNED, replica, [sure], flat)
    beside = choose(UNGOVERNED, replica, [sure, forced], flat)

    assert decision.most == (15,)
    best = decision.expected_tokens / decision.predicted_ms
    assert decision.least_chance == pytest.approx(6.0 * best / 0.8)
    assert beside.most == (12, 0)  # who asked for two gets two
    assert beside.drafts[1] == 2

    made = decision.as_made([2])
    assert (made.drafts, made.rows) == ((2,), 3)
    assert made.expected_tokens == pytest.approx(1 + 0.8 + 0.8**2)
    assert made.predicted_ms == decision.options[2].ms
    assert decision.as_made([4]) is decision


def test_forced_drafts_that_a_model_could_not_make_are_no_error() -> None:
    replica = ReplicaState()
    forced = Candidate(request(replica), 4, forced=4, by_model=True, round_ms=6.0)

    decision = choose(UNGOVERNED, replica, [forced], CHEAP)

    assert decision.drafts == (4,)
    assert decision.as_made([0]).drafts == (0,)


def test_a_first_stake_leaves_enough_for_another() -> None:
    replica = ReplicaState()
    replica.hazards.assume(0.95)
    state = RequestState.begin(replica, prefill_ms=0.0, likely_decode_ms=20 * 30.0)

    decision = choose(ControllerSettings(), replica, [by_model(state, 10.0)], CHEAP)

    one, two, three = decision.options[1:4]
    assert decision.allowance_ms == pytest.approx(30.0)  # 5% of 20 tokens
    assert three.ms - decision.base_ms > 30.0 > two.ms - decision.base_ms
    assert one.allowed
    assert not two.allowed  # it would leave 9 ms, and the least takes 10.5
    assert decision.drafts == decision.most == (1,)


def test_text_drafts_do_not_put_off_a_models_probe() -> None:
    replica, settings = ReplicaState(), ControllerSettings()
    for candidate, unprobed in (
        (Candidate(request(replica, hit_rate=1.0), 15, 8), 1),
        (by_model(request(replica, hit_rate=1.0), 0.1), 0),
    ):
        decision = choose(settings, replica, [candidate], CHEAP)
        settle(settings, replica, [candidate], decision, StepResult(30.0, 0.0, 0.0, 0.0, (1,)))

        assert decision.reason is Reason.DRAFTED
        assert replica.unprobed_steps == unprobed


def test_a_wide_draft_from_the_text_leaves_enough_for_one_by_the_model() -> None:
    replica = ReplicaState()
    state = RequestState.begin(replica, prefill_ms=0.0, likely_decode_ms=5 * 30.0)
    settings = ControllerSettings()  # 5% of five tokens: 7.5 ms

    alone = choose(settings, replica, [Candidate(state, 15, 8)], CHEAP)
    beside = choose(settings, replica, [Candidate(state, 15, 8, spare_ms=6.0)], CHEAP)

    assert [option.allowed for option in alone.options] == [True] * 6
    assert [option.rows for option in beside.options if option.allowed] == [1, 2, 3, 4]
