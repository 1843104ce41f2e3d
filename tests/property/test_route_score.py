"""The score against its definition, and what no input may do to a decision."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster.routing.demand import Demand
from rakv_cluster.routing.policy import Decision, RoutePolicy, RouteRequest, RouteSettings, explain
from rakv_cluster.routing.report import decode_report
from rakv_cluster.routing.score import (
    MAX_CROWDING,
    ChoiceSettings,
    Fleet,
    Reach,
    Reason,
    Scores,
    Work,
    choose,
    crowding,
    score,
)
from rakv_cluster.testing.clock import ManualClock

positive = st.floats(1e-3, 1e3)


def fleet(size: int, rng: np.random.Generator, **known: float) -> Fleet:
    """Random costs, all at least 0.1."""
    names = [name for name in Fleet.__dataclass_fields__ if name != "measured"]
    values = {name: 0.1 + 10 * rng.random(size) for name in names}
    return Fleet(**{**values, **{name: np.full(size, value) for name, value in known.items()}})


def reuse_by_definition(work: Work, reach: list[Reach], fleet: Fleet, row: int) -> float:
    """Least ms of load and prefill over every cut that is reached without a gap."""
    rate = {
        Reach.RAM: fleet.ram_ms[row],
        Reach.DISK: fleet.disk_ms[row],
        Reach.REMOTE: fleet.remote_ms[row],
    }

    def prefill(start: int) -> float:
        total = work.prompt_tokens
        slope = fleet.prefill_slope_ms[row] * (total**2 - start**2) / 2
        return float(fleet.prefill_ms[row] * (total - start) + slope)

    best, loaded, start = prefill(0), 0.0, 0
    for kind, chunk_end in zip(reach, work.chunk_ends.tolist(), strict=True):
        if kind is Reach.NONE:
            break
        end = min(chunk_end, work.prompt_tokens - 1)
        loaded += rate[kind] * (end - start) + fleet.chunk_ms[row]
        best, start = min(best, loaded + prefill(end)), end
    return best


@given(
    lengths=st.lists(st.integers(1, 300), max_size=12),
    tail=st.integers(0, 50),
    replicas=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_reuse_is_the_best_cut_without_a_gap(
    lengths: list[int], tail: int, replicas: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ends = np.cumsum(lengths, dtype=np.int64)
    work = Work(max(int(ends[-1]) if lengths else 0, 1) + tail, ends, 10.0)
    reach = rng.integers(0, 4, (replicas, len(lengths))).astype(np.uint8)
    known = fleet(replicas, rng)

    scores = score(work, reach, known)

    for row in range(replicas):
        expected = reuse_by_definition(work, [Reach(kind) for kind in reach[row]], known, row)
        assert scores.load_ms[row] + scores.prefill_ms[row] == pytest.approx(expected)
        assert 0 <= scores.reused_tokens[row] < work.prompt_tokens


@given(seed=st.integers(0, 2**32 - 1))
def test_terms_add_up_and_are_explained(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 200, 8))
    work = Work(int(ends[-1]) + 5, ends, 50.0)
    scores = score(work, rng.integers(0, 4, (6, 8)).astype(np.uint8), fleet(6, rng))
    ids = tuple("abcdef")

    lines = explain(Decision(ids, Reason.FASTEST, ids, scores))

    for line in lines:
        terms = {k: v for k, v in asdict(line).items() if k.endswith("_ms")}
        del terms["expected_ms"], terms["crowding_ms"]
        assert line.expected_ms == pytest.approx(sum(terms.values()))
        assert min(terms.values()) >= 0


@given(seed=st.integers(0, 2**32 - 1), extra_ms=positive)
def test_a_busier_replica_is_expected_later_by_just_that(seed: int, extra_ms: float) -> None:
    rng = np.random.default_rng(seed)
    work = Work(500, np.asarray([200, 400]), 20.0)
    reach = rng.integers(0, 4, (3, 2)).astype(np.uint8)
    known = fleet(3, rng)

    busier = np.asarray([extra_ms, 0.0, 0.0])
    before = score(work, reach, known)
    after = score(work, reach, replace(known, backlog_ms=known.backlog_ms + busier))

    assert after.total_ms - before.total_ms == pytest.approx(busier, abs=1e-6)


def test_before_costs_are_known_uncached_tokens_and_load_decide() -> None:
    rng = np.random.default_rng(0)
    known = replace(fleet(3, rng), open_requests=np.asarray([0.0, 1.0, 0.0]), measured=False)
    reach = np.asarray([[0, 1], [1, 1], [1, 0]], dtype=np.uint8)

    scores = score(Work(100, np.asarray([40, 80]), 10.0), reach, known)

    assert scores.total_ms.tolist() == [100.0, 40.0, 60.0]
    assert not scores.measured


def scores_of(*total_ms: float) -> Scores:
    total = np.asarray(total_ms)
    nothing = np.zeros(len(total))
    return Scores(*[nothing] * 6, total, nothing.astype(int), 0.0, True)


@given(seed=st.integers(0, 2**32 - 1), demand=st.integers(0, 200))
def test_crowding_prices_work_by_those_it_holds_up_less_those_it_serves(
    seed: int, demand: int
) -> None:
    rng = np.random.default_rng(seed)
    known = replace(fleet(4, rng), open_requests=rng.integers(0, 60, 4).astype(float))
    work = Work(500, np.asarray([200, 400]), 20.0)
    reach = rng.integers(0, 4, (4, 2)).astype(np.uint8)

    price = crowding(known, demand)
    scores = score(work, reach, known, crowding=price)

    assert 0 <= price <= MAX_CROWDING
    assert crowding(known, 0) == known.open_requests.mean()
    assert price == crowding(known, demand + 1) + 1 or price <= 1
    own = score(work, reach, known)
    assert np.array_equal(scores.total_ms, own.total_ms)
    work_ms = scores.load_ms + scores.prefill_ms
    assert scores.crowding_ms == pytest.approx(price * work_ms + known.recurring_ms)
    assert scores.cost_ms == pytest.approx(own.total_ms + scores.crowding_ms)


@pytest.mark.parametrize(("backlog_ms", "chosen"), [(1690.0, {0}), (1710.0, {1, 2})])
def test_a_session_moves_where_it_waits_longer_than_loading_it_holds_up_others(
    backlog_ms: float, chosen: set[int]
) -> None:
    """100 ms of loading are 100 of its own and 1,600 of the 16 open beside it (ADR 0097)."""
    rng = np.random.default_rng(0)
    known = fleet(
        3, rng, recurring_ms=0.0, open_requests=16.0, slots=64.0, prefill_ms=0.1,
        prefill_slope_ms=0.0, ram_ms=0.0, remote_ms=0.05, chunk_ms=0.0, token_ms=20.0,
        token_ms_slope=0.0,
    )  # fmt: skip
    known = replace(known, backlog_ms=np.asarray([backlog_ms, 0.0, 0.0]))
    reach = np.asarray([[Reach.RAM], [Reach.REMOTE], [Reach.REMOTE]], dtype=np.uint8)

    scores = score(Work(2020, np.asarray([2000]), 50.0), reach, known, crowding=crowding(known, 0))

    choice = choose(scores, np.arange(3), ChoiceSettings(exploration=0.0), rng)
    assert choice.order[0] in chosen


def test_nothing_is_priced_without_load() -> None:
    rng = np.random.default_rng(0)
    assert crowding(replace(fleet(3, rng), open_requests=np.zeros(3)), 0) == 0


def test_demand_counts_open_requests_by_key_and_is_bounded() -> None:
    demand = Demand(max_keys=6)
    for number in range(5):
        demand.add(f"q{number}", [b"shared", b"own%d" % number])
    demand.add("q4", [b"shared"])  # the same request, booked again elsewhere
    assert demand.of(b"shared") == len(demand) == 3
    assert demand.of(b"own0") == 0
    for number in range(5):
        demand.remove(f"q{number}")
    assert demand.of(b"shared") == demand.of(b"own4") == len(demand) == 0


def test_requests_that_want_no_chunk_are_not_remembered() -> None:
    """Nothing would ever push them out."""
    demand = Demand(max_keys=6)
    for number in range(100):
        demand.add(f"q{number}", [])
    assert len(demand) == 0


def test_ties_are_shared_and_exploration_reaches_everyone() -> None:
    rng = np.random.default_rng(1)
    candidates = np.arange(3)
    settings = ChoiceSettings(exploration=0.1, tie_ms=0.1)

    picks = [choose(scores_of(10.0, 10.05, 50.0), candidates, settings, rng) for _ in range(3000)]

    first = [sum(pick.order[0] == index for pick in picks) for index in range(3)]
    assert 0.4 < first[0] / 3000 < 0.6
    assert 0.4 < first[1] / 3000 < 0.6
    assert 0.02 < first[2] / 3000 < 0.05  # a third of a tenth
    assert {pick.reason for pick in picks if pick.order[0] == 2} == {Reason.EXPLORED}


def test_exploring_adds_no_more_work_than_its_share() -> None:
    rng = np.random.default_rng(1)
    work_ms = np.asarray([10.0, 5000.0])
    scores = replace(scores_of(*work_ms), prefill_ms=work_ms)
    settings = ChoiceSettings(exploration=0.5, tie_ms=0.1)

    picks = [choose(scores, np.arange(2), settings, rng).order[0] for _ in range(20_000)]

    assert 1 in picks
    assert work_ms[picks].mean() < 1.5 * work_ms[0]


def test_exploring_costs_everyone_no_more_than_its_share() -> None:
    """Where a ms of work holds up 99 others, work that is added counts a hundredfold."""
    rng = np.random.default_rng(1)
    work_ms = np.asarray([10.0, 60.0])
    scores = replace(scores_of(*work_ms), prefill_ms=work_ms, held_up=99.0)
    settings = ChoiceSettings(exploration=0.5, tie_ms=0.1)

    picks = [choose(scores, np.arange(2), settings, rng).order[0] for _ in range(20_000)]

    assert 1 in picks
    assert 100.0 * (work_ms[picks] - work_ms[0]).mean() < 0.5 * work_ms[0]


def test_order_is_by_expected_time_and_bounded() -> None:
    settings = ChoiceSettings(exploration=0.0, tie_ms=0.1, ranked=3)
    choice = choose(
        scores_of(5.0, 1.0, 4.0, 2.0, 3.0),
        np.asarray([0, 2, 3, 4]),
        settings,
        np.random.default_rng(0),
    )
    assert choice.order == (3, 4, 2)
    assert choice.reason is Reason.FASTEST


def test_without_a_finite_expectation_there_is_no_choice() -> None:
    with pytest.raises(FloatingPointError):
        choose(scores_of(np.nan, np.inf), np.arange(2), ChoiceSettings(), np.random.default_rng(0))


absurd = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**400), 10**400),
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=2000),
    st.lists(st.integers(), max_size=2),
)
FIELDS = [
    "format", "at_s", "backlog_ms", "open_requests", "slots", "prefill_ms", "prefill_slope_ms",
    "ram_ms", "disk_ms", "remote_ms", "chunk_ms", "token_ms", "token_ms_slope", "hold_ms", "pace",
    "hot",
]  # fmt: skip
stats = st.one_of(
    absurd,
    st.dictionaries(st.sampled_from(FIELDS), absurd).map(lambda each: {**each, "format": 1}),
    st.fixed_dictionaries(
        {"format": st.just(1), "pace": st.dictionaries(st.text(max_size=3) | st.floats(), absurd)}
    ),
)


@settings(max_examples=150)
@given(reports=st.lists(st.tuples(st.sampled_from("abcx"), stats, st.floats(0, 30)), max_size=12))
def test_whatever_replicas_say_someone_is_chosen(
    reports: list[tuple[str, object, float]],
) -> None:
    clock = ManualClock()
    policy = RoutePolicy(RouteSettings(), clock, np.random.default_rng(0))
    policy.view.set_replicas({"a": "n1", "b": "n1", "c": "n2"}, clock.monotonic_s())
    keys = tuple(bytes([number]) * 32 for number in range(3))

    for number, (replica, said, wait_s) in enumerate(reports):
        policy.hear(replica, decode_report(said))
        clock.advance(wait_s)
        request = RouteRequest(f"q{number}", keys, np.asarray([64, 128, 192]), 200, 30.0, "chat")
        decision = policy.decide(request)
        policy.book(request, decision, decision.order[0])

        assert decision.order[0] in {"a", "b", "c"}
        assert np.isfinite(decision.scores.total_ms).all()
        assert (decision.scores.total_ms >= 0).all()
