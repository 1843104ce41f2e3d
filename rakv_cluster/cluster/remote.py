"""Records on other nodes: where they are, what they hold, their KV.

A find costs at most two rounds of calls within its deadline: the owners of the keys say where they
are, then shards there say what they hold. A load asks those shards for the bytes, one bounded
batch per shard at a time, and verifies all it gets.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.messages import parse_found, parse_locations, parse_records
from rakv_cluster.cluster.peers import Answer, Call, Peers
from rakv_cluster.cluster.placement import Placement
from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.errors import CorruptRecord
from rakv_cluster.kv.codec import EncodedRecord, decode, parse_head
from rakv_cluster.store.base import Found, Loaded, LoadItem
from rakv_cluster.store.counters import Counters
from rakv_cluster.types import Tier

T = TypeVar("T")

_COUNTERS = ("remote_found", "remote_hits", "remote_misses", "remote_damaged", "remote_bytes")


@dataclass(frozen=True, slots=True)
class Route:
    """Which shard to ask for a record, and how many bytes it will send."""

    shard: str
    stored_bytes: int


class RemoteShards:
    """The other nodes' records as one process sees them. Used from any thread.

    ``keep`` is given every record that was loaded, to fill this node's shard.
    """

    def __init__(
        self,
        node: str,
        peers: Peers,
        limits: ClientLimits,
        clock: Clock,
        keep: Callable[[Sequence[EncodedRecord]], object],
    ) -> None:
        self._node = node
        self._peers = peers
        self._limits = limits
        self._clock = clock
        self._keep = keep
        self._lock = threading.Lock()
        self._placement = Placement(())
        self._routes: OrderedDict[bytes, Route] = OrderedDict()
        self._counters = Counters(_COUNTERS)

    def set_nodes(self, nodes: Iterable[str]) -> None:
        """The live nodes with a shard; routes to others are forgotten."""
        placement = Placement(nodes)
        self._peers.set_nodes(placement.nodes)
        with self._lock:
            self._placement = placement
            for key in [k for k, r in self._routes.items() if r.shard not in placement.nodes]:
                del self._routes[key]

    @property
    def placement(self) -> Placement:
        """Who owns which key now."""
        with self._lock:
            return self._placement

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Those of ``keys`` that another node holds; none where that takes too long."""
        with self._lock:
            placement = self._placement
            routes = self._known_routes(keys)
        if not keys or not set(placement.nodes) - {self._node}:
            return {}
        now_s, timeout_s = self._clock.monotonic_s(), self._limits.lookup_timeout_s
        shards = {key: route.shard for key, route in routes.items()}
        unknown = [key for key in keys if key not in shards]
        # Half the time, so that one late owner does not cost what the others know.
        located = self._locate(placement.group(unknown), now_s + timeout_s / 2)
        resting = self._peers.resting()
        for key, holders in located.items():
            others = [s for s in holders if s != self._node and s not in resting]
            if others:  # spread the readers of different keys over the holders
                shards[key] = others[int.from_bytes(key[-4:], "little") % len(others)]
        return self._confirm(shards, now_s + timeout_s)

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        """Load what :meth:`find` found; whatever comes late, damaged or not at all is a miss."""
        records = self.fetch([item.key for item in items])
        outcomes = [self._decode(item, records) for item in items]
        intact = [records[i.key] for i, o in zip(items, outcomes, strict=True) if o.ok]
        self._keep(intact)
        self._counters.add("remote_hits", len(intact))
        self._counters.add("remote_misses", len(items) - len(intact))
        self._counters.add("remote_bytes", sum(record.nbytes for record in intact))
        return outcomes

    def fetch(self, keys: Sequence[bytes]) -> dict[bytes, EncodedRecord]:
        """Bytes of records that :meth:`find` found; not verified.

        A shard has ``load_timeout_s`` for a batch and is not asked for more when it was late; all
        together may take as much longer as the bytes take at ``load_floor_bytes_per_s``.
        """
        with self._lock:
            waiting = self._known_routes(keys)
        limits = self._limits
        size_bytes = sum(route.stored_bytes for route in waiting.values())
        allowed_s = limits.load_timeout_s + size_bytes / limits.load_floor_bytes_per_s
        deadline_s = self._clock.monotonic_s() + allowed_s
        records: dict[bytes, EncodedRecord] = {}
        while waiting and (now_s := self._clock.monotonic_s()) < deadline_s:
            wave = self._next_wave(waiting)
            batch_deadline_s = min(deadline_s, now_s + limits.load_timeout_s)
            answers = self._ask("read", wave, batch_deadline_s, parse_records)
            for call, answer in answers:
                records |= {key: row for key, row in answer.items() if key in wave[call.node]}
            asked = {key for keys in wave.values() for key in keys}
            answered = {call.node for call, _ in answers}
            waiting = {
                key: route
                for key, route in waiting.items()
                if key not in asked and route.shard in answered
            }
        return records

    def counters(self) -> dict[str, int]:
        """Records by fate, and calls by outcome, since the start."""
        return self._counters.snapshot() | self._peers.counters()

    def _locate(
        self, groups: Mapping[str, Sequence[bytes]], deadline_s: float
    ) -> dict[bytes, tuple[str, ...]]:
        locations: dict[bytes, tuple[str, ...]] = {}
        for call, answer in self._ask("locate", groups, deadline_s, parse_locations):
            locations |= {key: row for key, row in answer.items() if key in groups[call.node]}
        return locations

    def _confirm(self, shards: Mapping[bytes, str], deadline_s: float) -> dict[bytes, Found]:
        """Ask each key's shard what it holds, and remember the routes that led somewhere."""
        groups: dict[str, list[bytes]] = {}
        for key, shard in shards.items():
            groups.setdefault(shard, []).append(key)
        found: dict[bytes, Found] = {}
        for call, answer in self._ask("find", groups, deadline_s, parse_found):
            found |= {
                key: dataclasses.replace(row, tier=Tier.REMOTE)
                for key, row in answer.items()
                if key in groups[call.node]
            }
        with self._lock:
            for key, shard in shards.items():
                self._routes.pop(key, None)
                if key in found:
                    self._routes[key] = Route(shard, found[key].stored_bytes)
            while len(self._routes) > self._limits.remembered_routes:
                self._routes.popitem(last=False)
        self._counters.add("remote_found", len(found))
        return found

    def _next_wave(self, waiting: Mapping[bytes, Route]) -> dict[str, list[bytes]]:
        """Per shard the next keys, together within the size of a batch but at least one."""
        wave: dict[str, list[bytes]] = {}
        room: dict[str, int] = {}
        for key, route in waiting.items():
            left = room.get(route.shard, self._limits.batch_bytes)
            room[route.shard] = left - route.stored_bytes
            if room[route.shard] >= 0 or route.shard not in wave:
                wave.setdefault(route.shard, []).append(key)
        return wave

    def _ask(
        self,
        method: str,
        groups: Mapping[str, Sequence[bytes]],
        deadline_s: float,
        parse: Callable[[object], dict[bytes, T]],
    ) -> list[tuple[Call, dict[bytes, T]]]:
        """One call per node; the answers that came. A call carries a bounded number of keys."""
        size = self._limits.batch_keys
        calls = [
            Call(node, method, (list(keys[start : start + size]),))
            for node, keys in groups.items()
            for start in range(0, len(keys), size)
        ]
        left_s = deadline_s - self._clock.monotonic_s()
        # A call without time would be late, and that would be held against a healthy shard.
        outcomes = self._peers.ask(calls, left_s, parse) if left_s > 0 else []
        return [
            (call, outcome.value)
            for call, outcome in zip(calls, outcomes, strict=False)
            if isinstance(outcome, Answer)
        ]

    def _known_routes(self, keys: Sequence[bytes]) -> dict[bytes, Route]:
        return {key: self._routes[key] for key in keys if key in self._routes}

    def _decode(self, item: LoadItem, records: Mapping[bytes, EncodedRecord]) -> Loaded:
        miss = Loaded(ok=False, tier=Tier.REMOTE)
        record = records.get(item.key)
        if record is None:
            return miss
        try:
            head = parse_head(record.head)
            if head.key != item.key or not item.accepts(head):
                return miss
            decode(head, record.body, item.out)
        except CorruptRecord:
            self._counters.add("remote_damaged")
            return miss
        return Loaded(ok=True, tier=Tier.REMOTE, stored_bytes=record.nbytes)
