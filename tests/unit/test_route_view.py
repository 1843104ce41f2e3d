"""What a router knows and forgets."""

from __future__ import annotations

import hashlib
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.routing.doubt import ORDINARY, doubted, typical
from rakv_cluster.routing.hot_set import BITS, CAPACITY, HASHES, HotSets, encode_hot_set, hash_rows
from rakv_cluster.routing.loads import Loads, LoadSettings
from rakv_cluster.routing.locations import directory_holders
from rakv_cluster.routing.output_length import OutputLengths
from rakv_cluster.routing.policy import RoutePolicy, RouteRequest, RouteSettings
from rakv_cluster.routing.replica_view import ViewSettings
from rakv_cluster.routing.report import (
    BEAT_S,
    FIELDS,
    ReplicaReport,
    decode_report,
    encode_report,
)
from rakv_cluster.routing.score import ChoiceSettings, Reason
from rakv_cluster.testing.clock import ManualClock

EXACT = RouteSettings(choice=ChoiceSettings(exploration=0.0))


def key_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def report(**changes: object) -> ReplicaReport:
    usual: dict[str, object] = {
        "backlog_ms": 0.0, "open_requests": 0.0, "slots": 16.0, "prefill_ms": 1.0,
        "prefill_slope_ms": 0.0, "ram_ms": 0.01, "disk_ms": 0.1, "remote_ms": 0.3,
        "chunk_ms": 0.3, "token_ms": 20.0, "token_ms_slope": 0.0, "hold_ms": 0.0,
    }  # fmt: skip
    return ReplicaReport(**{**usual, **changes})  # type: ignore[arg-type]  # a test's shorthand


def request(name: str = "q", document: str = "d", **changes: object) -> RouteRequest:
    keys = tuple(key_of((document, chunk)) for chunk in range(4))
    usual: dict[str, object] = {
        "request_id": name, "keys": keys, "chunk_ends": np.arange(1, 5) * 100,
        "prompt_tokens": 420, "output_tokens": 10.0,
    }  # fmt: skip
    return RouteRequest(**{**usual, **changes})  # type: ignore[arg-type]  # a test's shorthand


class Router:
    """A policy over replicas a, b (on node n1) and c (on n2), all of which have reported."""

    def __init__(self, settings: RouteSettings = EXACT) -> None:
        self.clock = ManualClock()
        self.policy = RoutePolicy(settings, self.clock, np.random.default_rng(0))
        self.members("a", "b", "c")
        for replica in "abc":
            self.hear(replica)

    def members(self, *ids: str) -> None:
        nodes = {replica: "n2" if replica == "c" else "n1" for replica in ids}
        self.policy.view.set_replicas(nodes, self.clock.monotonic_s())

    def hear(self, replica: str, **changes: object) -> None:
        self.policy.hear(replica, report(at_s=self.clock.wall_s(), **changes))

    def route(self, asked: RouteRequest, candidates: str = "") -> str:
        decision = self.policy.decide(asked, candidates)
        self.policy.book(asked, decision, decision.order[0])
        return decision.order[0]


def test_a_hot_set_claims_all_it_holds_and_little_else() -> None:
    held = [key_of(number) for number in range(CAPACITY)]
    sets = HotSets(3)
    sets.set(1, encode_hot_set(held))

    assert sets.lookup(hash_rows(held))[:, 1].all()
    strangers = hash_rows([key_of(("other", number)) for number in range(20_000)])
    stated = (1 - math.exp(-HASHES * CAPACITY / BITS)) ** HASHES
    assert stated == pytest.approx(0.0024, abs=1e-4)
    assert sets.lookup(strangers)[:, 1].mean() < 2 * stated
    assert not sets.lookup(strangers)[:, [0, 2]].any()


def test_a_hot_set_keeps_the_newest_and_survives_garbage() -> None:
    newest = [key_of(number) for number in range(CAPACITY + 100)]
    sets = HotSets(1)
    sets.set(0, encode_hot_set(newest))
    assert sets.lookup(hash_rows(newest[CAPACITY:])).mean() < 0.1
    sets.set(0, b"\xff" * 7)
    assert not sets.lookup(hash_rows(newest)).any()
    sets.set(0, encode_hot_set(newest[:1]))
    sets.set(0, encode_hot_set(newest[1:2]))
    assert sets.lookup(hash_rows(newest[:2]))[:, 0].tolist() == [False, True]


def test_reports_survive_the_way_and_say_the_same_when_idle() -> None:
    said = report(pace={"chat": 12.3456}, hot=encode_hot_set([key_of(1)]))
    stats = encode_report(said, wall_s=BEAT_S * 7)
    assert encode_report(said, wall_s=BEAT_S * 7.9) == stats
    assert encode_report(said, wall_s=BEAT_S * 8.1) != stats
    heard = decode_report(stats)
    assert heard.numbers() == said.numbers()
    assert heard.hot == said.hot
    assert heard.pace == {"chat": 12.3}
    assert heard.at_s == BEAT_S * 7
    busy = replace(said, open_requests=1.0)
    assert decode_report(encode_report(busy, wall_s=1000.126)).at_s == 1000.13


def test_every_number_of_a_report_has_a_plausible_range() -> None:
    assert {each.name for each in fields(ReplicaReport)} == {*FIELDS, "pace", "hot", "at_s"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e30, 10**400, "7", None, True])
def test_what_no_machine_can_mean_is_unknown(value: object) -> None:
    heard = decode_report({**encode_report(report(), 0.0), "backlog_ms": value})
    assert math.isnan(heard.backlog_ms)
    assert heard.prefill_ms == 1.0


def test_a_document_goes_back_to_its_replica_before_and_after_the_report() -> None:
    router = Router()
    first = router.route(request("q0"))
    router.clock.advance(1.0)
    assert router.route(request("q1")) == first

    router.clock.advance(60.0)  # the prediction is over, the hot set speaks
    router.hear(first, hot=encode_hot_set(request().keys))
    for other in {"a", "b", "c"} - {first}:
        router.hear(other)
    assert router.route(request("q2")) == first


def test_predictions_end() -> None:
    router = Router()
    router.route(request("q0"))
    router.clock.advance(30.0)
    decision = router.policy.decide(request("q1"))
    assert (decision.scores.reused_tokens == 0).all()


def test_a_busy_replica_sheds_its_document() -> None:
    router = Router()
    first = router.route(request("q0"))
    router.hear(first, backlog_ms=5000.0, hot=encode_hot_set(request().keys))
    assert router.route(request("q1")) != first


def test_disk_locations_count_by_node() -> None:
    router = Router()
    keys = request().keys
    located = dict.fromkeys(keys[:3], ("n2",))
    asked = request(holders=directory_holders(keys, located))
    scores = router.policy.decide(asked).scores
    assert scores.load_ms == pytest.approx([90.9, 90.9, 30.9])
    assert router.route(asked) == "c"


def test_a_gap_in_the_directory_ends_the_holders() -> None:
    assert directory_holders((b"a", b"b", b"c"), {b"a": ("n",), b"c": ("n",)}) == (("n",),)


def test_what_is_booked_counts_at_once_and_once() -> None:
    router = Router()
    spread = {router.route(request(f"q{n}", document=f"d{n}")) for n in range(3)}
    assert spread == {"a", "b", "c"}
    router.clock.advance(2.0)
    router.hear("a", backlog_ms=420.0, open_requests=1.0)
    loads = router.policy.view.loads
    assert loads.backlog_ms(router.clock.monotonic_s())[0] == pytest.approx(420.0)
    assert loads.open_requests(router.clock.monotonic_s())[0] == 1.0


def test_a_report_does_not_undo_what_was_sent_after_it_was_made() -> None:
    loads = Loads(1, LoadSettings(), 0.0)
    loads.book("early", 0, 300.0, 0.0)
    loads.book("late", 0, 500.0, 1.75)
    loads.report(0, 600.0, 1.0, age_s=0.5, now_s=2.0)
    assert loads.backlog_ms(2.0)[0] == 600.0 - 250.0 + 500.0 - 250.0
    assert loads.open_requests(2.0)[0] == 2.0


def test_a_report_that_was_long_on_its_way_does_not_undo_what_was_sent_meanwhile() -> None:
    router = Router()
    made_s = router.clock.wall_s()
    router.clock.advance(0.5)
    replica = router.route(request())
    router.clock.advance(0.5)
    router.policy.hear(replica, report(at_s=made_s))
    open_requests = router.policy.view.loads.open_requests(router.clock.monotonic_s())
    assert open_requests[router.policy.view.index[replica]] == 1.0
    router.policy.hear(replica, report(at_s=router.clock.wall_s()))
    assert not router.policy.view.loads.open_requests(router.clock.monotonic_s()).any()


@pytest.mark.parametrize("age_s", [math.nan, 1e9, math.inf])
def test_a_report_from_a_wrong_clock_counts_as_old_but_no_older(age_s: float) -> None:
    loads = Loads(1, LoadSettings(max_report_age_s=1.0), 0.0)
    loads.book("early", 0, 5000.0, 0.5)
    loads.book("late", 0, 700.0, 1.5)
    loads.report(0, 0.0, 0.0, age_s=age_s, now_s=2.0)
    assert loads.backlog_ms(2.0)[0] == 200.0
    assert loads.open_requests(2.0)[0] == 1.0


def test_a_report_without_a_number_takes_nothing_away() -> None:
    loads = Loads(1, LoadSettings(), 0.0)
    loads.book("early", 0, 900.0, 0.0)
    loads.report(0, math.nan, math.nan, age_s=0.0, now_s=0.5)
    assert loads.open_requests(0.5)[0] == 1.0
    assert loads.backlog_ms(0.5)[0] == 400.0
    loads.report(0, 300.0, math.nan, age_s=0.0, now_s=0.5)
    assert loads.open_requests(0.5)[0] == 1.0
    assert loads.backlog_ms(0.5)[0] == 300.0
    loads.report(0, math.nan, 0.0, age_s=0.0, now_s=0.5)
    assert loads.open_requests(0.5)[0] == 0.0


def test_backlog_is_worked_off_and_bookings_fade() -> None:
    loads = Loads(1, LoadSettings(booking_ttl_s=5.0), 0.0)
    loads.book("q", 0, 300.0, 0.0)
    assert loads.backlog_ms(0.1)[0] == pytest.approx(200.0)
    assert loads.backlog_ms(9.0)[0] == 0.0
    assert loads.open_requests(4.9)[0] == 1.0
    assert loads.open_requests(5.1)[0] == 0.0
    assert len(loads) == 0


def test_a_rerouted_request_is_booked_once() -> None:
    loads = Loads(2, LoadSettings(), 0.0)
    loads.book("q", 0, 300.0, 0.0)
    loads.book("q", 1, 300.0, 0.0)
    assert loads.backlog_ms(0.0).tolist() == [0.0, 300.0]
    loads.complete("q", 1)
    assert loads.open_requests(0.0).tolist() == [0.0, 0.0]


def test_work_of_late_weighs_by_the_chance_that_it_meets_other_work() -> None:
    loads = Loads(2, LoadSettings(recent_s=5.0), 0.0)
    loads.book("half", 0, 2500.0, 0.0)
    assert loads.recurring_ms(0.0).tolist() == [2500.0 / 2, 0.0]
    loads.book("half", 1, 2500.0, 0.0)  # it went elsewhere
    assert loads.recurring_ms(0.0).tolist() == [0.0, 2500.0 / 2]
    assert loads.recurring_ms(5.0)[1] == pytest.approx(2500.0 / 2 * math.exp(-2))
    loads.book("too much", 0, 60_000.0, 5.0)
    assert loads.recurring_ms(5.0)[0] == 60_000.0
    assert loads.arranged([1, 0, -1], 5.0).recurring_ms(5.0)[1:].tolist() == [60_000.0, 0.0]


def test_a_new_document_goes_where_less_came_of_late() -> None:
    """All are idle by now; what comes to ``a`` and ``b`` will come again."""
    router = Router()
    for number in range(40):
        router.route(request(f"old{number}", document=f"old{number}"), "ab")
    router.clock.advance(1.0)
    for name in "abc":
        router.hear(name)
    assert router.route(request("new", document="new")) == "c"


def test_silence_is_not_idleness() -> None:
    router = Router()
    router.clock.advance(20.0)
    router.hear("a", backlog_ms=900.0)
    router.hear("b", backlog_ms=700.0)
    backlog = router.policy.view.loads.backlog_ms(router.clock.monotonic_s())
    assert backlog.tolist() == [900.0, 700.0, 800.0]


def test_costs_of_a_silent_replica_become_those_of_the_others() -> None:
    router = Router()
    router.hear("c", prefill_ms=50.0, hot=encode_hot_set(request().keys))
    router.clock.advance(61.0)
    router.hear("a")
    router.hear("b")
    scores = router.policy.decide(request()).scores
    assert scores.prefill_ms.tolist() == [420.0] * 3


def test_requests_that_a_silent_replica_had_are_not_open_for_good() -> None:
    """Another ingress sent them, so that nobody here hears of their end."""
    router = Router()
    router.hear("c", open_requests=40.0)
    loads = router.policy.view.loads

    def passes(seconds: float) -> list[float]:
        router.clock.advance(seconds)
        router.hear("a", open_requests=4.0)
        router.hear("b", open_requests=2.0)
        router.policy.decide(request())
        return list(loads.open_requests(router.clock.monotonic_s()))

    assert passes(30.0) == [4.0, 2.0, 40.0]
    assert passes(31.0) == [4.0, 2.0, 3.0]
    router.route(request("sent"), "c")
    assert loads.open_requests(router.clock.monotonic_s())[2] == 4.0
    router.hear("c", open_requests=9.0)
    assert loads.open_requests(router.clock.monotonic_s())[2] >= 9.0


def test_requests_of_replicas_that_are_all_silent_are_forgotten() -> None:
    router = Router()
    for name in "abc":
        router.hear(name, open_requests=40.0)
    router.clock.advance(61.0)
    router.policy.decide(request())
    assert router.policy.view.loads.open_requests(router.clock.monotonic_s()).tolist() == [0.0] * 3


def test_what_a_stall_left_behind_fades_while_there_is_no_work() -> None:
    router = Router()
    stalled = {"prefill_ms": 57.0, "pace": {"chat": 900.0}}

    def passes(seconds: int) -> None:
        for _ in range(seconds):
            router.clock.advance(1.0)
            router.hear("a", pace={"chat": 9.0})
            router.hear("b", pace={"chat": 9.0})
            router.hear("c", **stalled)

    def believed() -> list[float]:
        scores = router.policy.decide(request(document="other", kind="chat")).scores
        return [float(scores.prefill_ms[2]) / 420, float(scores.decode_ms[2]) / 10]

    passes(1)
    assert believed()[0] > 50
    passes(10)
    assert believed()[0] == pytest.approx(2 + 55 * math.exp(-1.1))
    passes(60)
    assert believed() == pytest.approx([2.0, 18.0], rel=0.1)
    assert router.policy.view.fleet("", router.clock.monotonic_s()).slots.tolist() == [16.0] * 3

    router.route(request("tried"), "c")
    router.hear("c", open_requests=1.0, **stalled)
    assert believed() == [57.0, 900.0]  # measured again


def test_other_hardware_is_believed_for_good() -> None:
    router = Router()
    for _ in range(30):
        router.clock.advance(BEAT_S)
        router.hear("a")
        router.hear("b", prefill_ms=2.0, slots=64.0)
        router.hear("c", prefill_ms=0.1)
    scores = router.policy.decide(request()).scores
    assert scores.prefill_ms.tolist() == pytest.approx([420.0, 840.0, 42.0])


@pytest.mark.parametrize(("doubt_s", "comes_back"), [(10.0, True), (1e9, False)])
def test_a_replica_that_a_stall_made_look_slow_gets_work_again(
    doubt_s: float, comes_back: bool
) -> None:
    router = Router(replace(EXACT, view=ViewSettings(doubt_s=doubt_s)))
    to_c = 0
    for number in range(250):  # five a second, 0.4 s of work each: more than two replicas can do
        router.clock.advance(0.2)
        if number % 5 == 0:
            router.hear("c", prefill_ms=1.0 if to_c else 200.0)
        to_c += router.route(request(f"q{number}", document=f"d{number}")) == "c"
    assert (to_c > 0) == comes_back


@given(
    st.lists(st.floats(1e-3, 1e6) | st.just(math.nan), min_size=1, max_size=9),
    st.floats(0.0, 1e3),
    st.floats(0.1, 1e3),
)
def test_doubt_lowers_what_is_unusual_and_nothing_else(
    costs: list[float], idle_s: float, doubt_s: float
) -> None:
    claimed = np.asarray(costs)
    usual = typical(claimed)
    believed = doubted(claimed, usual, idle_s, doubt_s)

    known = sorted(cost for cost in costs if not math.isnan(cost))
    if known:
        assert usual == known[(len(known) - 1) // 2]
    ordinary = ~(claimed > ORDINARY * usual)
    np.testing.assert_array_equal(believed[ordinary], claimed[ordinary])
    assert (believed[~ordinary] <= claimed[~ordinary] * (1 + 1e-9)).all()
    assert (believed[~ordinary] >= ORDINARY * usual * (1 - 1e-9)).all()
    later = doubted(claimed, usual, idle_s + 1.0, doubt_s)
    assert (later[~ordinary] <= believed[~ordinary]).all()


def test_a_full_replica_is_expected_to_free_slots_at_its_usual_pace() -> None:
    router = Router()
    router.hear("a", open_requests=16.0, hold_ms=8000.0)  # of 16 slots
    router.hear("b", open_requests=19.0, hold_ms=8000.0)
    router.hear("c", open_requests=15.0, hold_ms=8000.0)
    waits_ms = router.policy.decide(request()).scores.slot_wait_ms
    assert waits_ms.tolist() == [500.0, 2000.0, 0.0]


def test_a_new_replica_takes_work_before_it_reports() -> None:
    router = Router()
    for replica in "abc":
        router.hear(replica, backlog_ms=400.0)
    router.members("a", "b", "c", "d")
    decision = router.policy.decide(request())
    assert decision.order[0] == "d"
    assert decision.scores.measured


def test_a_replica_that_is_gone_is_forgotten() -> None:
    router = Router()
    gone = router.route(request("q0"))
    stay = [replica for replica in "abc" if replica != gone]
    router.members(*stay)
    router.hear(gone)
    assert router.route(request("q1")) in stay
    router.members(*stay, gone)
    assert (router.policy.decide(request("q2")).scores.backlog_ms > 0).sum() == 1


def test_only_candidates_are_chosen() -> None:
    router = Router()
    asked = request()
    assert router.policy.decide(asked, ["b", "unknown"]).order == ("b",)
    assert router.policy.decide(asked, ["b"]).reason is Reason.ONLY
    with pytest.raises(LookupError):
        router.policy.decide(asked, ["unknown"])


def test_the_pace_of_a_kind_of_work_decides_where_it_runs() -> None:
    router = Router()
    for replica, copy_ms, chat_ms in (("a", 8.0, 20.0), ("b", 20.0, 12.0), ("c", 20.0, 20.0)):
        router.hear(replica, pace={"copy": copy_ms, "chat": chat_ms})
    assert router.policy.decide(request(kind="copy", output_tokens=100.0)).order[0] == "a"
    assert router.policy.decide(request(kind="chat", output_tokens=100.0)).order[0] == "b"


def test_kinds_of_work_that_go_push_out_none_that_stay() -> None:
    router = Router()

    def paces(kind: str) -> list[float]:
        fleet = router.policy.view.fleet(kind, router.clock.monotonic_s())
        return list(fleet.token_ms)

    for number in range(100):  # tenants come and go; "chat" is reported all the time
        router.hear("a", pace={"chat": 8.0, f"a{number}": 1.0})
        router.hear("b", pace={"chat": 12.0, f"b{number}": 1.0})
        assert paces("chat") == [8.0, 12.0, 20.0]
        assert paces(f"b{number}") == [20.0, 1.0, 20.0]
    router.hear("b")  # it has forgotten
    assert paces("chat") == [8.0, 20.0, 20.0]


def test_memory_stays_bounded() -> None:
    router = Router()
    for number in range(8_000):
        asked = request(f"q{number}", document=f"d{number}", kind=f"k{number}")
        router.route(asked)
        router.hear("a", pace={f"k{number}": 1.0})
        router.clock.advance(0.01)
    view, limits = router.policy.view, EXACT.view.locations
    assert view.locations.predictions == limits.max_predictions
    assert len(view.loads) <= 5.0 / 0.01 + 1
    assert view.kinds <= 64


def test_answers_are_expected_as_long_as_the_last_ones() -> None:
    lengths = OutputLengths()
    assert lengths.expected("chat", "t", 40) == 40
    assert lengths.expected("chat", "t", 4000) == 128
    for _ in range(100):
        lengths.observe("chat", "t", 300)
        lengths.observe("chat", "u", 10)
    assert lengths.expected("chat", "t", 4000) == pytest.approx(300, rel=0.01)
    assert 10 < lengths.expected("chat", "new", 4000) < 300
    for number in range(6_000):
        lengths.observe("chat", f"t{number}", 5)
    assert len(lengths) <= 4096
