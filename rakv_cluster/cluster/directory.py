"""Where records are: soft state that shards announce and partitions remember.

Every node holds one partition: the locations of the keys it owns by
:class:`~rakv_cluster.cluster.placement.Placement`. A shard announces what it stored and evicted to
the owners, in streams of numbered messages. A stream's message 0 replaces everything the shard
announced before; a later one is applied only in order. Whatever goes wrong (a message lost or
doubled, a partition or shard restarted, a node gone) ends in a new stream, so that a partition's
content converges to the truth with the next exchange. In between a location is a hint: the reader
verifies what it gets.

    Announcer (beside a shard) --Announcement--> DirectoryPartition --Changes--> DirectorySnapshot
              <------ accepted or not ----------                       (ingress, routers)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rakv_cluster.cluster.placement import Placement


@dataclass(frozen=True, slots=True)
class Announcement:
    """One message of a shard's stream to one partition. Doubling it does no harm.

    ``stream`` is unique over all restarts of all shards; ``sequence`` counts from 0 within it.
    """

    shard: str
    stream: str
    sequence: int
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A key's locations after a change; none means that no live shard is known to hold it."""

    key: bytes
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has followed a partition. The default is before everything.

    Of the keys that were there already when it began, the ``left`` newest are still to be shown.
    """

    incarnation: str = ""
    version: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened behind a reader's position, oldest first. ``fresh``: the reader begins anew
    and forgets what it knew."""

    position: Position
    fresh: bool
    changes: tuple[Change, ...]


@dataclass(slots=True)
class _Stream:
    name: str
    expected: int = 0
    keys: set[bytes] = field(default_factory=set)


class DirectoryPartition:
    """The locations of one node's share of the keys. Used by one thread.

    Holds at most ``max_keys`` keys: the key announced first goes first, which costs a miss where
    it would have been a hit. Remembers the last ``max_log`` changes for readers, and shows one that
    begins the ``max_shown`` newest keys.
    """

    def __init__(
        self,
        incarnation: str,
        *,
        max_keys: int = 500_000,
        max_log: int = 20_000,
        max_shown: int = 100_000,
    ) -> None:
        self._incarnation = incarnation
        self._max_keys = max_keys
        self._max_shown = max_shown
        self._live: frozenset[str] = frozenset()
        self._streams: dict[str, _Stream] = {}
        self._shards: dict[bytes, tuple[str, ...]] = {}
        self._version = 0
        self._log: deque[bytes] = deque(maxlen=max_log)
        self.overflowed = 0

    def __len__(self) -> int:
        return len(self._shards)

    def set_live(self, shards: Collection[str]) -> None:
        """Say which shards live; what others announced is forgotten, now and until they return."""
        self._live = frozenset(shards)
        for shard in [name for name in self._streams if name not in self._live]:
            self._forget(shard)

    def announce(self, message: Announcement) -> bool:
        """Apply a message; false: the shard must start a new stream (:class:`Announcer` does)."""
        stream = self._streams.get(message.shard)
        if message.shard not in self._live:
            return False
        if stream is None or stream.name != message.stream:
            if message.sequence != 0:
                return False
            self._forget(message.shard)
            stream = self._streams[message.shard] = _Stream(message.stream)
        if message.sequence > stream.expected:
            return False
        if message.sequence == stream.expected:
            stream.expected += 1
            self._apply(message, stream)
        return True

    def locate(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        """Those of ``keys`` with known locations; who announced last comes last."""
        return {key: self._shards[key] for key in keys if key in self._shards}

    def changes(self, since: Position, limit: int) -> Changes:
        """At most ``limit`` changes behind ``since``.

        A reader too far behind, or of an earlier incarnation, begins anew: it is shown the keys
        that are there, in several answers, each with what changed since the last.
        """
        behind = self._version - since.version
        fresh = since.incarnation != self._incarnation or not 0 <= behind <= len(self._log)
        if fresh:
            left = min(len(self._shards), self._max_shown)
            since, behind = Position(self._incarnation, self._version, left), 0
        start = len(self._log) - behind
        changed = list(itertools.islice(self._log, start, start + limit))
        # A change may move those left by one: to begin too early shows some twice.
        left = since.left + len(changed) if since.left else 0
        room = limit - len(changed)
        skipped = max(len(self._shards) - left, 0)
        older = itertools.islice(self._shards, skipped, skipped + room)
        keys = dict.fromkeys([*older, *changed])
        current = tuple(Change(key, self._shards.get(key, ())) for key in keys)
        position = Position(self._incarnation, since.version + len(changed), max(left - room, 0))
        return Changes(position, fresh, current)

    def _apply(self, message: Announcement, stream: _Stream) -> None:
        for key in message.removed:
            stream.keys.discard(key)
            self._set(key, without(self._shards.get(key, ()), message.shard))
        for key in message.added:
            stream.keys.add(key)
            others = without(self._shards.get(key, ()), message.shard)
            self._set(key, (*others, message.shard))
        while len(self._shards) > self._max_keys:
            oldest = next(iter(self._shards))
            for shard in self._shards[oldest]:
                self._streams[shard].keys.discard(oldest)
            self._set(oldest, ())
            self.overflowed += 1

    def _forget(self, shard: str) -> None:
        stream = self._streams.pop(shard, None)
        for key in stream.keys if stream else ():
            self._set(key, without(self._shards.get(key, ()), shard))

    def _set(self, key: bytes, shards: tuple[str, ...]) -> None:
        if shards == self._shards.get(key, ()):
            return
        if shards:
            self._shards[key] = shards
        else:
            del self._shards[key]
        self._version += 1
        self._log.append(key)


def without(shards: tuple[str, ...], shard: str) -> tuple[str, ...]:
    """``shards`` less ``shard``."""
    return tuple(other for other in shards if other != shard)


@dataclass(slots=True)
class _Outbox:
    """What one partition must still be told. ``sent`` is repeated until it is answered."""

    stream: str
    sequence: int = 0
    pending: dict[bytes, bool] = field(default_factory=dict)
    sent: Announcement | None = None


class Announcer:
    """Tells the partitions what a shard holds. Used by one thread.

    ``incarnation`` must differ at every start of the shard. Memory is proportional to the records
    of the shard. One message per partition is out at a time, of at most ``batch_keys`` keys.
    """

    def __init__(self, shard: str, incarnation: str, *, batch_keys: int = 4096) -> None:
        self._shard = shard
        self._incarnation = incarnation
        self._batch_keys = batch_keys
        self._streams = itertools.count()
        self._placement = Placement(())
        self._owners: dict[bytes, str] = {}
        self._outboxes: dict[str, _Outbox] = {}

    def set_nodes(self, nodes: Iterable[str]) -> None:
        """The partitions now; keys whose owner moves are told to the new and taken from the old."""
        before, keys = self._outboxes, list(self._owners)
        self._placement = Placement(nodes)
        self._outboxes = {
            node: before.get(node) or _Outbox(self._next_stream()) for node in self._placement.nodes
        }
        owners = self._placement.owners(keys) if self._outboxes else [""] * len(keys)
        for key, owner in zip(keys, owners, strict=True):
            if owner != self._owners[key]:
                self._tell(self._owners[key], key, present=False)
                self._tell(owner, key, present=True)
                self._owners[key] = owner

    def record(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The shard has stored ``added`` and, before that, dropped ``removed``."""
        for key in removed:
            self._tell(self._owners.pop(key, ""), key, present=False)
        owners = self._placement.owners(added) if self._outboxes else [""] * len(added)
        for key, owner in zip(added, owners, strict=True):
            self._owners[key] = owner
            self._tell(owner, key, present=True)

    def hold(self, keys: Sequence[bytes]) -> None:
        """The shard holds exactly ``keys``, whatever was recorded."""
        held = set(keys)
        gone = [key for key in self._owners if key not in held]
        self.record([key for key in held if key not in self._owners], gone)

    def messages(self, *, heartbeat: bool = False) -> dict[str, Announcement]:
        """What to send to each partition now: news, else an unanswered message again.

        ``heartbeat`` adds an empty message to the others, by which a partition that restarted
        makes itself known.
        """
        messages = {}
        for node, box in self._outboxes.items():
            if box.sent is None and (heartbeat or _unsaid(box)):
                box.sent = self._compose(box)
            if box.sent is not None:
                messages[node] = box.sent
        return messages

    def answered(self, node: str, message: Announcement, *, accepted: bool) -> None:
        """The partition on ``node`` answered. An answer to an older message changes nothing."""
        box = self._outboxes.get(node)
        if box is None or box.sent != message:
            return
        if accepted:
            box.sequence += 1
            box.sent = None
            return
        held = [key for key, owner in self._owners.items() if owner == node]
        self._outboxes[node] = _Outbox(self._next_stream(), pending=dict.fromkeys(held, True))

    def _compose(self, box: _Outbox) -> Announcement:
        batch = list(itertools.islice(box.pending.items(), self._batch_keys))
        for key, _ in batch:
            del box.pending[key]
        return Announcement(
            self._shard,
            box.stream,
            box.sequence,
            added=tuple(key for key, present in batch if present),
            removed=tuple(key for key, present in batch if not present),
        )

    def _tell(self, node: str, key: bytes, *, present: bool) -> None:
        if node in self._outboxes:
            self._outboxes[node].pending[key] = present

    def _next_stream(self) -> str:
        return f"{self._incarnation}/{next(self._streams)}"


def _unsaid(box: _Outbox) -> bool:
    # A stream that is not open yet has its message 0 to send, even for no key: it ends the last.
    return bool(box.pending) or box.sequence == 0


class DirectorySnapshot:
    """A reader's copy of the directory: local hints without a call. Used by one thread.

    Holds at most ``max_keys`` keys per partition, the newest ones.
    """

    def __init__(self, *, max_keys: int = 100_000) -> None:
        self._max_keys = max_keys
        self._placement = Placement(())
        self._live: frozenset[str] = frozenset()
        self._tables: dict[str, dict[bytes, tuple[str, ...]]] = {}
        self._positions: dict[str, Position] = {}

    def set_nodes(self, nodes: Iterable[str]) -> None:
        """The live nodes; partitions and locations on others are forgotten."""
        self._placement = Placement(nodes)
        self._live = frozenset(self._placement.nodes)
        self._positions = {node: at for node, at in self._positions.items() if node in self._live}
        self._tables = {node: rows for node, rows in self._tables.items() if node in self._live}

    def positions(self) -> Mapping[str, Position]:
        """For every partition, from where to ask it for :class:`Changes`."""
        return {node: self._positions.get(node, Position()) for node in self._placement.nodes}

    def apply(self, node: str, changes: Changes) -> None:
        """Take over what the partition on ``node`` answered; of a node that is gone, nothing."""
        if node not in self._live:
            return
        rows = {} if changes.fresh else self._tables.get(node, {})
        for change in changes.changes:
            rows.pop(change.key, None)
            if change.shards:
                rows[change.key] = change.shards
        while len(rows) > self._max_keys:
            del rows[next(iter(rows))]
        self._tables[node] = rows
        self._positions[node] = changes.position

    def locate(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        """Those of ``keys`` with a known location on a live node."""
        if not self._tables:
            return {}
        found = {}
        for key, owner in zip(keys, self._placement.owners(keys), strict=True):
            shards = self._tables[owner].get(key, ()) if owner in self._tables else ()
            if not self._live.issuperset(shards):
                shards = tuple(shard for shard in shards if shard in self._live)
            if shards:
                found[key] = shards
        return found
