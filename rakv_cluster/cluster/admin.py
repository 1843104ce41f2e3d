"""The whole cluster's store in an operator's hands. Not on any request's path.

Every operation goes to every shard and answers by node; a node that is missing in an answer did not
give one in time. All are idempotent: repeat them until every member has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.breaker import BreakerLimits
from rakv_cluster.cluster.messages import parse_count, parse_found, parse_keys, parse_stats
from rakv_cluster.cluster.peers import Answer, Call, Peers, Transport
from rakv_cluster.cluster.placement import Placement
from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.store.base import Found, StoreStats

T = TypeVar("T")


_DRAIN_KEYS = 16
"""Records that each node copies in one call of a drain."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Of a node's hottest records: ``copied`` to others, ``left`` alone there when time was over,
    and ``elsewhere``: on another node before."""

    copied: int
    left: int
    elsewhere: int


class StoreAdmin:
    """Looks at and changes what the shards hold. ``members`` are the nodes that have one."""

    def __init__(
        self,
        transport: Transport,
        members: Callable[[], Sequence[str]],
        clock: Clock,
        *,
        timeout_s: float = 30.0,
        batch_keys: int = 1024,
    ) -> None:
        # An operator's call is never skipped because earlier ones failed.
        patient = BreakerLimits(failures=1_000_000)
        self._peers = Peers(transport, patient, clock)
        self._members = members
        self._clock = clock
        self._timeout_s = timeout_s
        self._batch_keys = batch_keys

    def members(self) -> tuple[str, ...]:
        """The nodes that have a shard."""
        return tuple(self._members())

    def lookup(self, keys: Sequence[bytes]) -> dict[str, dict[bytes, Found]]:
        """Which of ``keys`` each node holds, by its own word."""
        answers = self._each("find", keys, parse_found)
        return {
            node: {key: found for part in parts for key, found in part.items()}
            for node, parts in answers.items()
        }

    def evict(self, keys: Sequence[bytes]) -> dict[str, list[bytes]]:
        """Remove records everywhere; the keys that each node held."""
        return _joined(self._each("delete", keys, parse_keys))

    def clear(self, namespace: bytes) -> dict[str, int]:
        """Remove all records of a namespace; how many each node held."""
        calls = [Call(node, "clear", (namespace,)) for node in self._members()]
        return self._by_node(calls, parse_count)

    def warm(self, keys: Sequence[bytes], nodes: Sequence[str]) -> dict[str, list[bytes]]:
        """Copy records to ``nodes`` from wherever they are; the keys that each holds then."""
        return _joined(self._each("warm", keys, parse_keys, nodes))

    def drain(self, node: str, *, limit_bytes: int, deadline_s: float) -> Drained:
        """Copy a node's hottest records to the others, before the node is removed as planned.

        At most ``limit_bytes`` of records that no other node holds, spread over the others, as far
        as ``deadline_s`` allows; those used last first. The node goes on serving meanwhile and
        afterwards. Raises ``StoreUnavailable`` if it does not answer.
        """
        ends_s = self._clock.monotonic_s() + deadline_s
        others = [member for member in self._members() if member != node]
        asked = self._by_node([Call(node, "hottest", (limit_bytes,))], parse_keys)
        if node not in asked:
            raise StoreUnavailable(f"the shard on node {node} does not answer")
        held = self._each("find", asked[node], parse_found, others)
        elsewhere = {key for parts in held.values() for part in parts for key in part}
        lonely = [key for key in asked[node] if key not in elsewhere]
        groups = Placement(others).group(lonely)
        copied: set[bytes] = set()
        for start in range(0, max(map(len, groups.values()), default=0), _DRAIN_KEYS):
            left_s = min(ends_s - self._clock.monotonic_s(), self._timeout_s)
            if left_s <= 0:
                break
            calls = [
                Call(other, "warm", (keys[start : start + _DRAIN_KEYS],))
                for other, keys in groups.items()
                if keys[start:]
            ]
            for outcome in self._peers.ask(calls, left_s, parse_keys):
                copied.update(outcome.value if isinstance(outcome, Answer) else ())
        return Drained(len(copied), len(lonely) - len(copied), len(elsewhere))

    def pin(self, keys: Sequence[bytes], owner: str, ttl_s: float) -> dict[str, list[bytes]]:
        """Keep records where they are for ``ttl_s`` seconds; the keys that each node pinned.

        A pin ends by itself or by :meth:`unpin`; it keeps a record from eviction, not from
        :meth:`evict` and :meth:`clear`.
        """
        return _joined(self._each("pin", keys, parse_keys, rest=(owner, ttl_s)))

    def unpin(self, keys: Sequence[bytes], owner: str) -> dict[str, int]:
        """End an owner's pins; how many each node had."""
        answers = self._each("unpin", keys, parse_count, rest=(owner,))
        return {node: sum(parts) for node, parts in answers.items()}

    def stats(self) -> dict[str, StoreStats]:
        """Each shard's sizes and counters."""
        return self._by_node([Call(node, "stats") for node in self._members()], parse_stats)

    def _each(
        self,
        method: str,
        keys: Sequence[bytes],
        parse: Callable[[object], T],
        nodes: Sequence[str] | None = None,
        rest: tuple[object, ...] = (),
    ) -> dict[str, list[T]]:
        """Batches of keys to every node; only nodes that answered all of them."""
        answers: dict[str, list[T]] = {}
        waiting = list(self._members() if nodes is None else nodes)
        for start in range(0, max(len(keys), 1), self._batch_keys):
            batch = list(keys[start : start + self._batch_keys])
            answered = self._by_node(
                [Call(node, method, (batch, *rest)) for node in waiting], parse
            )
            waiting = list(answered)
            for node, answer in answered.items():
                answers.setdefault(node, []).append(answer)
        return {node: answers[node] for node in waiting}

    def _by_node(self, calls: Sequence[Call], parse: Callable[[object], T]) -> dict[str, T]:
        outcomes = self._peers.ask(calls, self._timeout_s, parse)
        return {
            call.node: outcome.value
            for call, outcome in zip(calls, outcomes, strict=True)
            if isinstance(outcome, Answer)
        }


def _joined(answers: dict[str, list[list[bytes]]]) -> dict[str, list[bytes]]:
    return {node: [key for part in parts for key in part] for node, parts in answers.items()}
