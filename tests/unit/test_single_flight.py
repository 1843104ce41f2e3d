"""What one replica computes, another waits for: engines on simulated nodes, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster.cluster.directory import Announcement
from rakv_cluster.cluster.settings import ClientLimits, ClusterStoreSettings
from rakv_cluster.cluster.shard_actor import ShardActor
from rakv_cluster.cluster.store_client import NodeStore
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.errors import ConfigError
from rakv_cluster.reuse.flights import Claimant, FlightLimits, give_up
from rakv_cluster.reuse.planner import ReusePlan
from rakv_cluster.store.flight import Claim, SingleFlight
from rakv_cluster.store.lmdb_shard import ShardSettings
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness, Recording
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.simulated_shards import Fault, SimulatedShards
from rakv_cluster.types import Chunk, FinishReason

NODES = ["n0", "n1", "n2"]
DOCUMENT = [(index * 5 + 1) % 64 for index in range(40)]
ANSWER_TOKENS = 12
PATIENT = FlightLimits(min_compute_ms=5.0, slack_s=1000.0, longest_s=1000.0, poll_s=0.001)
"""Waits longer than any test runs: who finishes did not wait in vain."""


class Interrupted:
    """A flight before whose first claim something else happens."""

    def __init__(self, flight: SingleFlight, happens: Callable[[], object]) -> None:
        self._flight = flight
        self._happens: list[Callable[[], object]] = [happens]

    def claim(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> Claim:
        while self._happens:
            self._happens.pop()()
        return self._flight.claim(keys, holder, ttl_s)

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        self._flight.release(keys, holder)


class Replicas:
    """An engine on each node, over one simulated cluster and one clock.

    ``between`` happens between the last node's first look into the store and its claim.
    """

    def __init__(
        self, engine: EngineSettings, between: Callable[[Replicas], object] = lambda _: None
    ) -> None:
        self._asked = 0
        self.clock = ManualClock()
        self.shards = SimulatedShards(NODES, self.clock, np.random.default_rng(0))
        self.stores: list[NodeStore] = []
        self.engines: dict[str, EngineHarness] = {}
        for node in NODES:
            store = NodeStore(
                node, self.shards, ClientLimits(refresh_s=3600.0, await_poll_s=0.001), self.clock
            )  # no shard lies where the simulation says, so that all reads are remote
            store.refresh()
            self.stores.append(store)
            self.engines[node] = EngineHarness(
                FakeRunner(clock=self.clock),
                store,
                self.clock,
                settings=engine,
                flight=Interrupted(store, lambda: between(self)) if node == NODES[-1] else store,
            )

    def ask(self, node: str, *segments: Sequence[int]) -> Recording:
        engine = self.engines[node]
        self._asked += 1
        name = f"request-{self._asked}"
        return engine.add(EngineRequest(name, engine.prompt(*segments), ANSWER_TOKENS))

    def run(self, *recordings: Recording, nodes: Sequence[str] = NODES) -> None:
        """Let the engines of ``nodes`` step in turn until all have ended."""
        for _ in range(2000):
            if all(recording.finish is not None for recording in recordings):
                return
            for node in nodes:
                self.engines[node].step()
        raise AssertionError("a request does not end")

    def awaited(self, node: str) -> tuple[int, int]:
        """How many requests of a node waited for others, and how many gave up."""
        counters = self.engines[node].core.stats().counters
        return counters.flights_awaited, counters.flight_timeouts

    def leased(self, chunks: Sequence[Chunk]) -> list[bytes]:
        """Keys of ``chunks`` that somebody is to compute."""
        return list(self.stores[0].claim([c.prefix_key for c in chunks], "probe", 0.0).theirs)

    def close(self) -> None:
        for store in self.stores:
            store.close()


def expected(*segments: Sequence[int]) -> list[int]:
    ids = [token_id for segment in segments for token_id in segment]
    return FakeRunner().generate(ids, ANSWER_TOKENS)


@contextmanager
def opened(
    limits: FlightLimits | EngineSettings, between: Callable[[Replicas], object] = lambda _: None
) -> Iterator[Replicas]:
    engine = limits if isinstance(limits, EngineSettings) else EngineSettings(flight=limits)
    replicas = Replicas(engine, between)
    try:
        yield replicas
    finally:
        replicas.close()


@pytest.fixture
def patient() -> Iterator[Replicas]:
    with opened(PATIENT) as replicas:
        yield replicas


def test_a_document_asked_for_on_every_node_is_computed_once(patient: Replicas) -> None:
    questions = [[node, 7, 9] for node in range(3)]
    answers = [
        patient.ask(node, DOCUMENT, question)
        for node, question in zip(NODES, questions, strict=True)
    ]

    patient.run(*answers)

    assert [answer.token_ids for answer in answers] == [expected(DOCUMENT, q) for q in questions]
    assert [a.stats.computed_tokens for a in answers] == [len(DOCUMENT) + 3, 3, 3]
    assert answers[1].stats.disk_tokens == len(DOCUMENT)
    assert [patient.awaited(node) for node in NODES] == [(0, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize("steps", range(12))
def test_a_record_that_comes_between_look_and_claim_is_not_computed_again(steps: int) -> None:
    """Its lease has ended with it: what is granted then is there."""

    def some_come(replicas: Replicas) -> None:
        for _ in range(steps):
            replicas.engines["n0"].step()

    with opened(PATIENT, some_come) as replicas:
        first = replicas.ask("n0", DOCUMENT, [7])
        replicas.engines["n0"].step()
        second = replicas.ask("n2", DOCUMENT, [8])

        replicas.run(first, second)

        assert second.token_ids == expected(DOCUMENT, [8])
        assert (first.stats.computed_tokens, second.stats.computed_tokens) == (len(DOCUMENT) + 1, 1)
        assert replicas.leased(replicas.engines["n0"].prompt(DOCUMENT, [8]).chunks) == []


def test_a_slow_holder_keeps_its_leases() -> None:
    """Lease and patience are 0.4 s; prefill and some steps of the answer take 2 s."""
    with opened(FlightLimits(min_compute_ms=5.0, longest_s=0.4)) as replicas:
        holder = replicas.ask("n0", DOCUMENT * 6, [7])
        for _ in range(6):
            replicas.engines["n0"].step()
            replicas.clock.advance(0.3)

        assert replicas.clock.monotonic_s() > 2.0
        chunks = replicas.engines["n0"].prompt(DOCUMENT * 6, [7]).chunks
        assert set(replicas.leased(chunks)) == {chunk.prefix_key for chunk in chunks[6:]}
        replicas.run(holder)
        assert replicas.leased(chunks) == []


def test_a_holder_that_is_preempted_lets_others_compute() -> None:
    granule_bytes = 256 * FakeRunner().layout.bytes_per_token
    tight = EngineSettings(
        flight=PATIENT, kv_budget_bytes=2 * granule_bytes, max_step_tokens=16, growth_tokens=1
    )
    with opened(tight) as replicas:
        elder = replicas.ask("n0", [3] * 250, [7])
        while not elder.token_ids:
            replicas.engines["n0"].step()
        younger = replicas.ask("n0", DOCUMENT * 5, [7])
        chunks = replicas.engines["n0"].prompt(DOCUMENT * 5, [7]).chunks
        replicas.engines["n0"].step()
        assert replicas.leased(chunks) != []

        while not replicas.engines["n0"].core.stats().counters.preemptions:
            replicas.engines["n0"].step()

        assert younger.token_ids == []
        assert replicas.leased(chunks) == []


def test_what_is_left_of_a_document_is_waited_for_however_little_it_is() -> None:
    """Once a request waits it waits for all: the holder computes the last chunks in any case."""
    limits = FlightLimits(min_compute_ms=30.0, slack_s=1000.0, longest_s=1000.0, poll_s=0.001)
    with opened(limits) as replicas:
        first, second = (replicas.ask(node, DOCUMENT, [7]) for node in ("n0", "n1"))

        replicas.run(first, second)

        assert [a.stats.computed_tokens for a in (first, second)] == [len(DOCUMENT) + 1, 1]


def test_who_waits_claims_only_the_first_chunk(patient: Replicas) -> None:
    """Each owner answers for itself: with a later chunk's lease it would compute that chunk."""
    first, second = (patient.ask(node, DOCUMENT, [7]) for node in ("n0", "n1"))

    patient.run(first, second)

    batches: dict[object, list[list[bytes]]] = {"request-1": [], "request-2": []}
    for keys, holder, _ in (c.args for c in patient.shards.calls if c.method == "acquire"):
        assert isinstance(keys, list)
        batches[holder].append(keys)
    assert {len(keys) for keys in batches["request-2"]} == {1}
    assert {key for keys in batches["request-1"] for key in keys} == {
        chunk.prefix_key for chunk in patient.engines["n0"].prompt(DOCUMENT, [7]).chunks
    }


def test_who_shares_only_a_beginning_waits_only_for_that(patient: Replicas) -> None:
    system, others = DOCUMENT[:16], [(index * 3 + 2) % 64 for index in range(200)]
    first = patient.ask("n0", system, others, [1])
    patient.engines["n0"].step()
    second = patient.ask("n1", system, DOCUMENT, [2])

    patient.run(second)

    assert second.token_ids == expected(system, DOCUMENT, [2])
    assert second.stats.computed_tokens == len(DOCUMENT) + 1
    patient.run(first)


def test_a_holder_that_dies_costs_the_life_of_its_lease() -> None:
    limits = FlightLimits(min_compute_ms=5.0, slack_s=0.3)
    with opened(limits) as replicas:
        replicas.ask("n0", DOCUMENT, [7])
        replicas.engines["n0"].step()  # the last thing that this replica does

        answers = [replicas.ask(node, DOCUMENT, [7]) for node in ("n1", "n2")]
        replicas.run(*answers, nodes=["n1", "n2"])

        assert [answer.token_ids for answer in answers] == [expected(DOCUMENT, [7])] * 2
        # The first chunk may have been stored before.
        assert sum(a.stats.computed_tokens > len(DOCUMENT) // 2 for a in answers) == 1
        lease_ms = limits.lease_s(compute_ms=2 * len(DOCUMENT)) * 1e3
        assert all(answer.stats.load_ms <= 2 * lease_ms for answer in answers)


def test_a_holder_that_is_cancelled_gives_its_leases_up(patient: Replicas) -> None:
    patient.ask("n0", DOCUMENT, [7])
    patient.engines["n0"].core.step()
    second = patient.ask("n1", DOCUMENT, [7])
    patient.engines["n1"].step()

    patient.engines["n0"].core.cancel("request-1")
    patient.run(second, nodes=["n1"])

    assert second.token_ids == expected(DOCUMENT, [7])
    assert patient.awaited("n1")[1] == 0


def test_who_waits_keeps_nobody_out() -> None:
    """Two requests wait on a replica that works on one at a time; a third is served meanwhile."""
    narrow = EngineSettings(flight=PATIENT, max_running=1)
    with opened(narrow) as replicas:
        first = replicas.ask("n0", DOCUMENT, [7])
        replicas.engines["n0"].step()
        waiting = [replicas.ask("n1", DOCUMENT, [question]) for question in (8, 9)]
        for _ in range(3):
            replicas.engines["n1"].step()
        other = replicas.ask("n1", [5] * 20, [1])

        replicas.run(other, nodes=["n1"])

        assert [each.token_ids for each in waiting] == [[], []]
        replicas.run(first, *waiting)
        for question, each in zip((8, 9), waiting, strict=True):
            assert each.token_ids == expected(DOCUMENT, [question])
            assert each.stats.computed_tokens == 1


def test_a_waiter_can_be_cancelled(patient: Replicas) -> None:
    patient.ask("n0", DOCUMENT, [7])
    patient.engines["n0"].step()
    second = patient.ask("n1", DOCUMENT, [7])
    for _ in range(2):
        patient.engines["n1"].step()
    assert patient.awaited("n1") == (1, 0)

    patient.engines["n1"].core.cancel("request-2")

    assert second.finish is FinishReason.CANCELLED
    patient.engines["n1"].core.check_invariants()


def test_a_record_that_the_directory_does_not_take_ends_no_lease(tmp_path: Path) -> None:
    """Nobody could find it: who asks next would compute it again."""
    settings = ClusterStoreSettings(str(tmp_path), ShardSettings(budget_bytes=1 << 20))
    shard = ShardActor("n0", "shard", settings)
    key = bytes(32)

    asyncio.run(shard.acquire([key], "first", 60.0))
    # No node manager has said yet that there is a node n9.
    assert not asyncio.run(shard.announce(Announcement("n9", "stream", 0, added=(key,))))
    assert asyncio.run(shard.acquire([key], "second", 60.0))[key].holder == "first"
    asyncio.run(shard.close())


@pytest.mark.parametrize("fault", list(Fault)[1:])
def test_without_owners_everyone_computes(patient: Replicas, fault: Fault) -> None:
    patient.shards.faults = dict.fromkeys(NODES, fault)
    answers = [patient.ask(node, DOCUMENT, [7]) for node in NODES]

    patient.run(*answers)

    assert [answer.token_ids for answer in answers] == [expected(DOCUMENT, [7])] * 3
    assert [patient.awaited(node) for node in NODES] == [(0, 0)] * 3


def test_what_is_cheap_to_compute_is_not_asked_about() -> None:
    with opened(FlightLimits(min_compute_ms=1000.0)) as replicas:
        answers = [replicas.ask(node, DOCUMENT, [7]) for node in NODES]

        replicas.run(*answers)

        assert "acquire" not in [call.method for call in replicas.shards.calls]


def test_a_flight_that_raises_is_computed(patient: Replicas) -> None:
    class Broken:
        def claim(self, keys: Sequence[bytes], holder: str, ttl_s: float) -> Claim:
            raise ZeroDivisionError

        def release(self, keys: Sequence[bytes], holder: str) -> None:
            raise ZeroDivisionError

    engine = patient.engines["n0"]
    chunks = engine.prompt(DOCUMENT, [7]).chunks

    claimant = Claimant(Broken(), PATIENT, "me")
    _, departure = claimant.depart(ReusePlan(), ReusePlan, lambda _: chunks, engine.core.costs)
    give_up(chunks, Broken(), "me")

    assert (departure.claimed, departure.waits) == (chunks, False)


@pytest.mark.parametrize("field", ["min_compute_ms", "slack_s", "longest_s", "poll_s"])
def test_useless_limits_are_named(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FlightLimits(**{field: -1.0})
    assert caught.value.field == field


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NODES),
            st.lists(st.integers(0, 2), min_size=1, max_size=4),
            st.integers(0, 6),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_no_two_requests_wait_for_each_other(
    asked: list[tuple[str, list[int], int]],
) -> None:
    """Prompts of three parts in any order, so that beginnings are shared in all ways."""
    parts = [[(index * step + step) % 64 for index in range(16)] for step in (3, 5, 7)]
    with opened(PATIENT) as replicas:
        prompts = [[*(parts[part] for part in chosen), [9]] for _, chosen, _ in asked]
        answers = []
        for (node, _, steps), prompt in zip(asked, prompts, strict=True):
            answers.append(replicas.ask(node, *prompt))
            for _ in range(steps):
                replicas.engines[node].step()

        replicas.run(*answers)

        assert [answer.token_ids for answer in answers] == [expected(*each) for each in prompts]
        assert [replicas.awaited(node)[1] for node in NODES] == [0, 0, 0]
