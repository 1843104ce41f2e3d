"""Which nodes should have a shard, which have one, and what to do about the difference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.settings import ManagerLimits


@dataclass(frozen=True, slots=True)
class Node:
    """A live node and the name of its shard's folder, which identifies it over restarts."""

    node: str
    folder: str = "shard"


@dataclass(frozen=True, slots=True)
class Starting:
    """Created, never answered yet. ``attempt`` counts from 1 and falls back when it serves."""

    since_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class Serving:
    """Answered at ``seen_s``."""

    seen_s: float


@dataclass(frozen=True, slots=True)
class Broken:
    """Dead, or could not start; to be tried again from ``retry_at_s`` on."""

    retry_at_s: float
    attempt: int


ShardState: TypeAlias = Starting | Serving | Broken


@dataclass(frozen=True, slots=True)
class Start:
    """Create the node's shard actor."""

    node: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the node's shard actor, wherever it is in its life."""

    node: str


Action: TypeAlias = Start | Stop


def reconcile(
    desired: Collection[str],
    actual: Mapping[str, ShardState],
    now_s: float,
    limits: ManagerLimits,
) -> list[Action]:
    """What brings ``actual`` to ``desired``: every live node has one shard that answers.

    A shard that has been silent for ``limits.silence_s`` is stopped; it is started again when its
    :class:`Broken` state says so, which :func:`broken` decides. Stops come first.
    """
    actions: list[Action] = [
        Stop(node)
        for node, state in sorted(actual.items())
        if node not in desired or _silent(state, now_s, limits)
    ]
    for node in sorted(desired):
        state = actual.get(node, Broken(retry_at_s=now_s, attempt=0))
        if isinstance(state, Broken) and state.retry_at_s <= now_s:
            actions.append(Start(node, state.attempt + 1))
    return actions


def broken(state: ShardState, now_s: float, limits: ManagerLimits) -> Broken:
    """The state of a shard that died: try at once if it was serving, else wait ever longer."""
    if isinstance(state, Broken):
        return state
    if isinstance(state, Serving):
        return Broken(retry_at_s=now_s, attempt=0)
    backoff_s = min(limits.min_backoff_s * 2.0 ** (state.attempt - 1), limits.max_backoff_s)
    return Broken(retry_at_s=now_s + backoff_s, attempt=state.attempt)


def _silent(state: ShardState, now_s: float, limits: ManagerLimits) -> bool:
    if isinstance(state, Broken):
        return False
    since_s = state.seen_s if isinstance(state, Serving) else state.since_s
    return now_s - since_s > limits.silence_s


class Fleet(Protocol):
    """How shard actors come, go and answer. None of these raises for a shard's fault."""

    def nodes(self) -> Sequence[Node]:
        """The live nodes."""
        ...

    def start(self, node: Node) -> None:
        """Create the node's shard actor, or adopt the one that is there."""
        ...

    def stop(self, node: str) -> None:
        """End the node's shard actor; nothing where there is none."""
        ...

    def ping(self, nodes: Sequence[str], members: Sequence[str]) -> Mapping[str, bool]:
        """Tell the shards on ``nodes`` who the ``members`` are. True: answered; False: dead.

        A shard that is only late is absent.
        """
        ...


class NodeManager:
    """Keeps one shard per live node. Used by one thread, which calls :meth:`step` periodically."""

    def __init__(self, fleet: Fleet, limits: ManagerLimits, clock: Clock) -> None:
        self._fleet = fleet
        self._limits = limits
        self._clock = clock
        self._states: dict[str, ShardState] = {}

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes whose shard serves, sorted: the placement of the directory."""
        return tuple(sorted(n for n, s in self._states.items() if isinstance(s, Serving)))

    def step(self) -> None:
        """Look at the nodes, act on the difference, ping every shard, twice if members change."""
        nodes = {node.node: node for node in self._fleet.nodes()}
        for action in reconcile(nodes, self._states, self._clock.monotonic_s(), self._limits):
            self._act(action, nodes)
        told = self.members
        self._ping(told)
        if self.members != told:
            self._ping(self.members)

    def stop(self) -> None:
        """End every shard."""
        for node in sorted(self._states):
            self._fleet.stop(node)
        self._states.clear()

    def _ping(self, members: Sequence[str]) -> None:
        asked = [n for n, state in self._states.items() if not isinstance(state, Broken)]
        answers = self._fleet.ping(asked, members)
        now_s = self._clock.monotonic_s()
        for node, alive in answers.items():
            state = self._states[node]
            self._states[node] = Serving(now_s) if alive else broken(state, now_s, self._limits)

    def _act(self, action: Action, nodes: Mapping[str, Node]) -> None:
        now_s = self._clock.monotonic_s()
        if isinstance(action, Start):
            self._states[action.node] = Starting(now_s, action.attempt)
            self._fleet.start(nodes[action.node])
            return
        state = self._states.pop(action.node)
        self._fleet.stop(action.node)
        if action.node in nodes:
            self._states[action.node] = broken(state, now_s, self._limits)
