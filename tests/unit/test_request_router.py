"""The Serve router without Ray: what it makes of candidates, tickets and Serve's calls."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.errors import ConfigError
from rakv_cluster.routing.hot_set import encode_hot_set
from rakv_cluster.routing.report import ReplicaReport, encode_report
from rakv_cluster.routing.request_router import ExpectedTimeRouter, ScoreGuard
from rakv_cluster.routing.ticket import Fallback, RouteTicket
from rakv_cluster.serving.app import running
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.types import Chunk, ChunkedPrompt, ReuseMode

CHUNK = 64


@dataclass
class FakeReplica:
    """What the router reads of Serve's RunningReplica."""

    name: str
    routing_stats: Any = field(default_factory=dict)
    node_id: str = "n1"
    max_ongoing_requests: int = 100

    @property
    def replica_id(self) -> SimpleNamespace:
        return SimpleNamespace(unique_id=self.name)


def engine_request(request_id: str = "q", document: str = "d", **changes: Any) -> EngineRequest:
    ids = tuple(range(3 * CHUNK))
    chunks = tuple(
        Chunk(n * CHUNK, ids[n * CHUNK : (n + 1) * CHUNK], b"", key_of(document, n))
        for n in range(3)
    )
    prompt = ChunkedPrompt(b"ns", (*ids, 7, 8), chunks, 0, b"tail")
    return EngineRequest(request_id, prompt, max_tokens=10, **changes)


def key_of(document: str, number: int) -> bytes:
    return hashlib.sha256(f"{document}/{number}".encode()).digest()


def stats(wall_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    usual = {
        "backlog_ms": 0.0, "open_requests": 0.0, "slots": 8.0, "prefill_ms": 1.0,
        "prefill_slope_ms": 0.0, "ram_ms": 0.001, "disk_ms": 0.1, "remote_ms": 0.2,
        "chunk_ms": 0.1, "token_ms": 10.0, "token_ms_slope": 0.0, "hold_ms": 0.0,
    }  # fmt: skip
    return encode_report(ReplicaReport(**{**usual, **changes}), wall_s)


def pending(*args: Any) -> Any:
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=list(args), routing_context=context)


class Router:
    """An :class:`ExpectedTimeRouter` whose replicas are fakes."""

    def __init__(self, replicas: list[FakeReplica], exploration: float = 0.0) -> None:
        self.replicas = replicas
        # Without the base's constructor, which wants a running Serve application.
        self.subject = ExpectedTimeRouter.__new__(ExpectedTimeRouter)
        self.subject.initialize_state(exploration=exploration)
        self.hear()

    def hear(self) -> None:
        self.subject._hear(self.replicas)

    def ranks(self, asked: Any) -> list[list[str]]:
        ranked = asyncio.run(self.subject.choose_replicas(self.replicas, asked))
        return [[replica.name for replica in rank] for rank in ranked]

    def routed(self, asked: Any, name: str) -> None:
        self.subject.on_request_routed(asked, SimpleNamespace(unique_id=name), None)

    def open_requests(self) -> list[float]:
        self.hear()
        policy = self.subject._policy
        return list(policy.view.loads.open_requests(policy.now_s))

    def wanting(self, document: str) -> int:
        """Open requests that want a document's first chunk."""
        return self.subject._policy.demand.of(key_of(document, 0))


@pytest.fixture
def router() -> Router:
    hot = encode_hot_set([key_of("d", number) for number in range(3)])
    return Router(
        [FakeReplica("a", stats()), FakeReplica("b", stats(hot=hot)), FakeReplica("c", stats())]
    )


def test_the_replica_with_the_document_comes_first_alone(router: Router) -> None:
    asked = pending(engine_request(), RouteTicket())
    ranks = router.ranks(asked)
    assert ranks[0] == ["b"]
    assert sorted(chain(*ranks)) == ["a", "b", "c"]
    assert asked.routing_context.should_backoff


def test_a_second_dispatch_avoids_where_the_first_went(router: Router) -> None:
    ranks = router.ranks(pending(engine_request(), RouteTicket(avoid=frozenset({"b"}))))
    assert "b" not in ranks[0]
    assert sorted(chain(*ranks)) == ["a", "b", "c"]  # Serve may still fall back to it
    everyone = RouteTicket(avoid=frozenset({"a", "b", "c"}))
    assert router.ranks(pending(engine_request(), everyone))[0] == ["b"]


def test_a_request_that_reuses_nothing_is_not_drawn_to_it(router: Router) -> None:
    ticket = RouteTicket()
    router.ranks(pending(engine_request(reuse=ReuseMode.OFF), ticket))
    assert (ticket.decided[0].scores.reused_tokens == 0).all()


def test_bookings_follow_the_request_to_its_end(router: Router) -> None:
    ticket = RouteTicket()
    asked = pending(engine_request(), ticket)
    router.ranks(asked)
    assert router.open_requests() == [0.0, 1.0, 0.0]
    router.routed(asked, "c")  # Serve gave it to another
    assert router.open_requests() == [0.0, 0.0, 1.0]
    assert ticket.replica == "c"
    ticket.close()
    assert router.open_requests() == [0.0, 0.0, 0.0]
    assert router.wanting("d") == 0


def test_choices_of_one_request_end_one_by_one(router: Router) -> None:
    tickets = [RouteTicket() for _ in range(3)]
    for index, ticket in enumerate(tickets):
        asked = pending(engine_request(f"q-{index}"), ticket)
        router.ranks(asked)
        router.routed(asked, "b")
    for left in (2.0, 1.0, 0.0):
        assert router.wanting("d") == left + 1
        tickets.pop().close()
        assert router.open_requests() == [0.0, left, 0.0]


def test_nothing_is_left_of_requests_that_ended_or_left_before_a_replica_took_them(
    router: Router,
) -> None:
    for number in range(100):
        ticket = RouteTicket()
        asked = pending(engine_request(f"q-{number}"), ticket)
        router.ranks(asked)
        if number % 2:
            router.routed(asked, "b")
        ticket.close()
    assert router.open_requests() == [0.0, 0.0, 0.0]
    assert router.wanting("d") == 0
    subject = router.subject
    assert not any((subject._booked, subject._running, subject._over))


@pytest.mark.parametrize("asked_again", [False, True])
def test_serve_may_hear_late_that_a_request_is_over(router: Router, asked_again: bool) -> None:
    ticket = RouteTicket()
    asked = pending(engine_request(), ticket)
    router.ranks(asked)
    ticket.close()
    if asked_again:
        router.ranks(asked)
    else:
        router.hear()
    router.routed(asked, "b")
    assert router.open_requests() == [0.0, 0.0, 0.0]
    assert router.wanting("d") == 0


def test_a_trial_books_nothing(router: Router) -> None:
    ticket = RouteTicket(trial=True)
    router.ranks(pending(engine_request(), ticket))
    assert ticket.reason == "fastest"
    assert router.open_requests() == [0.0, 0.0, 0.0]


def test_a_trial_tells_where_requests_go_not_where_one_in_a_hundred_does() -> None:
    hot = encode_hot_set([key_of("d", number) for number in range(3)])
    router = Router([FakeReplica("a", stats()), FakeReplica("b", stats(hot=hot))], exploration=1.0)
    for _ in range(20):
        ticket = RouteTicket(trial=True)
        assert router.ranks(pending(engine_request(), ticket))[0] == ["b"]
        assert ticket.reason == "fastest"
    ticket = RouteTicket()
    router.ranks(pending(engine_request(reuse=ReuseMode.OFF), ticket))
    assert ticket.reason == "explored"


def test_other_calls_go_to_one_of_two(router: Router) -> None:
    for asked in (pending(), pending("text"), None):
        assert [len(rank) for rank in router.ranks(asked)] == [2]


def test_a_failing_score_is_not_a_failing_request(router: Router) -> None:
    broken = engine_request()
    object.__setattr__(broken, "prompt", None)
    ticket = RouteTicket()
    assert [len(rank) for rank in router.ranks(pending(broken, ticket))] == [2]
    assert ticket.reason == Fallback.FAILED.value

    after = RouteTicket()
    router.ranks(pending(engine_request(), after))
    assert after.reason == "score_failed"  # at rest for a second

    trial = RouteTicket(trial=True)
    router.ranks(pending(engine_request(), trial))
    assert trial.reason == "fastest"


def test_a_replica_to_avoid_is_not_among_two_at_random(router: Router) -> None:
    broken = engine_request()
    object.__setattr__(broken, "prompt", None)
    router.ranks(pending(broken, RouteTicket()))
    ticket = RouteTicket(avoid=frozenset({"b"}))
    for _ in range(10):
        assert sorted(*router.ranks(pending(engine_request(), ticket))) == ["a", "c"]
    assert ticket.reason == "score_failed"


def test_no_candidate_is_no_choice(router: Router) -> None:
    asked = pending(engine_request(), RouteTicket())
    assert asyncio.run(router.subject.choose_replicas([], asked)) == []


@pytest.mark.parametrize(
    "said", [{}, None, {"format": 99}, stats(backlog_ms=float("inf")), {"format": 1, "hot": 7}]
)
def test_absurd_reports_leave_a_choice(router: Router, said: Any) -> None:
    for replica in router.replicas:
        replica.routing_stats = said
    router.hear()
    ranks = router.ranks(pending(engine_request(), RouteTicket()))
    assert len(list(chain(*ranks))) == 3


def test_a_repeated_report_is_no_news(router: Router) -> None:
    asked = pending(engine_request(), RouteTicket())
    router.ranks(asked)
    assert router.open_requests() == [0.0, 1.0, 0.0]
    router.replicas[1].routing_stats = stats(wall_s=10.0, open_requests=5.0)
    router.hear()
    assert router.open_requests()[1] == 6.0  # what was sent since may not be in it


def test_a_ticket_crosses_empty(router: Router) -> None:
    ticket = RouteTicket(output_tokens=7.0, holders=(("n1",),))
    router.ranks(pending(engine_request(), ticket))
    assert ticket.decided
    assert pickle.loads(pickle.dumps(ticket)) == RouteTicket()  # noqa: S301  # as Ray does


def test_late_decisions_in_a_row_rest_the_score() -> None:
    clock = ManualClock()
    guard = ScoreGuard(clock)
    for seconds in (0.5, 0.5, 0.001, 0.5, 0.5):
        guard.took(seconds)
    assert guard.resting() == []
    guard.took(0.5)
    assert guard.resting() == [Fallback.LATE]
    clock.advance(1.1)
    assert guard.resting() == []


def test_a_replica_that_left_and_what_it_had_is_forgotten(router: Router) -> None:
    ticket = RouteTicket()
    router.ranks(pending(engine_request(), ticket))
    router.replicas = [router.replicas[0], router.replicas[2]]
    router.hear()
    assert router.ranks(pending(engine_request("q2"), RouteTicket()))[0] in (["a"], ["c"])
    ticket.close()
    router.hear()
    assert len(router.subject._heard) == 2


@dataclass
class Probed(FakeReplica):
    """Says how many requests it has once ``answers`` is set; ``asked`` is set when it is asked."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica_id(self) -> Any:
        return ReplicaID(self.name, DeploymentID("Worker", "rakv"))

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked.set()
        await self.answers.wait()
        return 0


async def test_a_choice_is_not_handed_to_a_request_that_waits_for_its_own() -> None:
    """Serve's own code around the router: it asks ``a``, of which it knows no queue, how full it
    is; meanwhile a second request is routed."""
    hot = {name: encode_hot_set([key_of(name, number) for number in range(3)]) for name in "ab"}
    replicas = [Probed(name, stats(hot=hot[name])) for name in "ab"]
    source = DeploymentHandleSource.REPLICA
    router = ExpectedTimeRouter(replicas[0].replica_id.deployment_id, source, "", None, True)
    router.initialize_state(exploration=0.0)
    router.queue_len_response_deadline_s = 60.0
    router.update_replicas(replicas)
    await replicas[0].asked.wait()  # Serve asks new ones at once
    replicas[0].asked.clear()
    router.replica_queue_len_cache.update(replicas[1].replica_id, 0)

    def ask(document: str) -> asyncio.Task[Any]:
        request, metadata = engine_request(document, document), RequestMetadata("r", "shared id")
        asked = PendingRequest([request, RouteTicket()], {}, metadata)
        return asyncio.create_task(router._choose_replica_for_request(asked))

    first = ask("a")
    await replicas[0].asked.wait()
    second = ask("b")
    await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
    assert not first.done()
    assert (await second).name == "b"
    replicas[0].answers.set()
    assert (await first).name == "a"


def test_serves_haproxy_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match="HAProxy"), running(Settings()):
        pytest.fail("it started")
