"""The node manager: reconciliation as a function, and a manager over nodes that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rakv_cluster.cluster.membership import (
    Broken,
    Node,
    NodeManager,
    Serving,
    ShardState,
    Start,
    Starting,
    Stop,
    broken,
    reconcile,
)
from rakv_cluster.cluster.settings import ManagerLimits
from rakv_cluster.testing import ManualClock

LIMITS = ManagerLimits(silence_s=10.0, min_backoff_s=1.0, max_backoff_s=8.0)
NODES = ["n0", "n1", "n2"]
node_names = st.sampled_from(NODES)
times = st.floats(0, 100)
states = st.one_of(
    st.builds(Starting, since_s=times, attempt=st.integers(1, 9)),
    st.builds(Serving, seen_s=times),
    st.builds(Broken, retry_at_s=times, attempt=st.integers(0, 9)),
)


@given(st.sets(node_names), st.dictionaries(node_names, states), times)
def test_actions_are_the_difference_and_no_more(
    desired: set[str], actual: dict[str, ShardState], now_s: float
) -> None:
    actions = reconcile(desired, actual, now_s, LIMITS)
    assert len(actions) == len({action.node for action in actions})
    for action in actions:
        state = actual.get(action.node)
        if isinstance(action, Start):
            assert action.node in desired
            assert state is None or (isinstance(state, Broken) and state.retry_at_s <= now_s)
    stopped = {action.node for action in actions if isinstance(action, Stop)}
    assert set(actual) - desired <= stopped
    started = {action.node for action in actions if isinstance(action, Start)}
    assert desired - set(actual) <= started


def test_a_silent_shard_is_replaced_and_a_merely_late_one_is_not() -> None:
    actual = {"n0": Serving(seen_s=0.0), "n1": Serving(seen_s=5.0), "n2": Starting(0.0, 1)}
    assert reconcile(NODES, actual, 10.5, LIMITS) == [Stop("n0"), Stop("n2")]


def test_a_shard_that_served_is_retried_at_once_and_one_that_never_did_ever_later() -> None:
    assert broken(Serving(5.0), 7.0, LIMITS) == Broken(7.0, 0)
    waits = [broken(Starting(0.0, attempt), 0.0, LIMITS).retry_at_s for attempt in range(1, 7)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


class FakeFleet:
    """Nodes and actors as Ray shows them.

    An actor needs ``start_pings`` pings until it answers. ``refusing`` nodes let no actor live (a
    folder that cannot be used), ``stalled`` ones do not answer, neither to pings nor to a stop.
    """

    def __init__(self) -> None:
        self.live: set[str] = set(NODES[:1])
        self.actors: dict[str, int] = {}
        self.refusing: set[str] = set()
        self.stalled: set[str] = set()
        self.heard: dict[str, tuple[str, ...]] = {}
        self.starts: list[str] = []
        self.start_pings = 2

    def nodes(self) -> Sequence[Node]:
        return [Node(name) for name in sorted(self.live)]

    def start(self, node: Node) -> None:
        self.starts.append(node.node)
        self.actors.setdefault(node.node, 0)

    def stop(self, node: str) -> None:
        self.actors.pop(node, None)
        self.stalled.discard(node)

    def ping(self, nodes: Sequence[str], members: Sequence[str]) -> Mapping[str, bool]:
        answers = {}
        for node in nodes:
            if node not in self.actors or node not in self.live or node in self.refusing:
                self.actors.pop(node, None)
                answers[node] = False
                continue
            self.actors[node] += 1
            if node not in self.stalled and self.actors[node] >= self.start_pings:
                self.heard[node] = tuple(members)
                answers[node] = True
        return answers


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.fleet = FakeFleet()
        self.manager = NodeManager(self.fleet, LIMITS, self.clock)

    @rule(name=node_names)
    def node_comes(self, name: str) -> None:
        self.fleet.live.add(name)

    @rule(name=node_names)
    def node_dies(self, name: str) -> None:
        self.fleet.live.discard(name)
        self.fleet.actors.pop(name, None)

    @rule(name=node_names)
    def shard_dies(self, name: str) -> None:
        self.fleet.actors.pop(name, None)

    @rule(name=node_names)
    def shard_stalls(self, name: str) -> None:
        self.fleet.stalled.add(name)

    @rule(name=node_names)
    def folder_breaks(self, name: str) -> None:
        self.fleet.refusing.add(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0]))
    def step(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.manager.step()

    @rule()
    def manager_restarts(self) -> None:
        """It forgets everything and adopts what runs."""
        self.manager = NodeManager(self.fleet, LIMITS, self.clock)

    @precondition(lambda self: self.fleet.refusing)
    @rule()
    def a_broken_folder_is_not_tried_all_the_time(self) -> None:
        """Ten seconds at full speed: at most a try per doubling of the wait."""
        before = len(self.fleet.starts)
        for _ in range(100):
            self.clock.advance(0.1)
            self.manager.step()
        tries = self.fleet.starts[before:]
        assert all(tries.count(name) <= 8 for name in self.fleet.refusing)

    @rule()
    def settle(self) -> None:
        """Once faults end, every live node has a shard that knows exactly the others."""
        self.fleet.refusing.clear()
        self.fleet.stalled.clear()
        for _ in range(60):
            self.clock.advance(0.5)
            self.manager.step()
        assert set(self.manager.members) == self.fleet.live == set(self.fleet.actors)
        for name in self.fleet.live:
            assert self.fleet.heard[name] == self.manager.members

    def teardown(self) -> None:
        self.settle()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_stop_leaves_no_actor_behind(steps: int) -> None:
    fleet = FakeFleet()
    fleet.live = set(NODES)
    clock = ManualClock()
    manager = NodeManager(fleet, LIMITS, clock)
    for _ in range(steps):
        clock.advance(1.0)
        manager.step()
    manager.stop()
    assert fleet.actors == {}
    assert manager.members == ()


def test_a_shard_that_starts_is_told_of_the_others_at_once() -> None:
    fleet = FakeFleet()
    fleet.start_pings = 1
    fleet.live = set(NODES)
    manager = NodeManager(fleet, LIMITS, ManualClock())
    manager.step()
    assert fleet.heard == dict.fromkeys(NODES, tuple(NODES))
