"""The whole cluster's store in an operator's hands. Not on any request's path.

Every operation goes to every shard and answers by node; a node that is missing in an answer did not
give one in time. All are idempotent: repeat them until every member has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.breaker import BreakerLimits
from rakv_cluster.cluster.messages import parse_count, parse_found, parse_keys, parse_stats
from rakv_cluster.cluster.peers import Answer, Call, Peers, Transport
from rakv_cluster.store.base import Found, StoreStats

T = TypeVar("T")


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
