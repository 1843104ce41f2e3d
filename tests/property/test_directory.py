"""The directory against a dict, with messages lost, doubled and reordered, and nodes dying."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rakv_cluster.cluster.directory import (
    Announcement,
    Announcer,
    DirectoryPartition,
    DirectorySnapshot,
    Position,
)
from rakv_cluster.cluster.placement import Placement

NODES = ["n0", "n1", "n2", "n3"]
KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(24)]
BATCH_KEYS = 3  # small, so that a full announcement takes several messages
nodes = st.sampled_from(NODES)
some_keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=8)


@dataclass
class Node:
    """A node's shard content, which survives it, and what dies with its process."""

    stored: set[bytes] = field(default_factory=set)
    starts: int = 0
    announcer: Announcer = field(default_factory=lambda: Announcer("", ""))
    partition: DirectoryPartition = field(default_factory=lambda: DirectoryPartition(""))


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = {name: Node() for name in NODES}
        self.live: set[str] = set()
        self.wire: list[tuple[str, Announcement]] = []
        self.snapshot = DirectorySnapshot(max_keys=1000)
        for name in NODES[:2]:
            self.start(name)

    # Nodes.

    @rule(name=nodes)
    def start(self, name: str) -> None:
        """Start or restart a node's actor: its records are still on its disk."""
        node = self.nodes[name]
        node.starts += 1
        incarnation = f"{name}#{node.starts}"
        node.announcer = Announcer(name, incarnation, batch_keys=BATCH_KEYS)
        node.announcer.record(sorted(node.stored), ())
        node.partition = DirectoryPartition(incarnation, max_log=10)
        self.live.add(name)
        self.announce_membership()

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.live.discard(data.draw(st.sampled_from(sorted(self.live))))
        self.announce_membership()

    def announce_membership(self) -> None:
        for name in self.live:
            self.nodes[name].announcer.set_nodes(self.live)
            self.nodes[name].partition.set_live(self.live)
        self.snapshot.set_nodes(self.live)

    # Records.

    @rule(name=nodes, added=some_keys, removed=some_keys)
    def commit(self, name: str, added: list[bytes], removed: list[bytes]) -> None:
        node = self.nodes[name]
        if name in self.live:
            evicted = [key for key in removed if key in node.stored]
            node.stored = (node.stored - set(evicted)) | set(added)
            node.announcer.record(added, evicted)

    # The wire.

    @rule(name=nodes, heartbeat=st.booleans())
    def send(self, name: str, heartbeat: bool) -> None:
        if name in self.live:
            self.wire.extend(self.nodes[name].announcer.messages(heartbeat=heartbeat).items())

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), copies=st.integers(0, 2), answer_lost=st.booleans())
    def deliver(self, data: st.DataObject, copies: int, answer_lost: bool) -> None:
        """Take any message off the wire and let it arrive never, once or twice."""
        index = data.draw(st.integers(0, len(self.wire) - 1))
        node, message = self.wire.pop(index)
        for _ in range(copies):
            self.arrive(node, message, answer_lost=answer_lost)

    def arrive(self, node: str, message: Announcement, *, answer_lost: bool) -> None:
        if node not in self.live:
            return
        accepted = self.nodes[node].partition.announce(message)
        if not answer_lost and message.shard in self.live:
            self.nodes[message.shard].announcer.answered(node, message, accepted=accepted)

    @rule(name=nodes, limit=st.integers(1, 9))
    def follow(self, name: str, limit: int) -> None:
        """The reader catches up with one partition, a bounded step."""
        if name in self.live:
            since = self.snapshot.positions()[name]
            self.snapshot.apply(name, self.nodes[name].partition.changes(since, limit))

    # What must hold.

    @invariant()
    def no_location_on_a_dead_node(self) -> None:
        for name in self.live:
            for shards in self.nodes[name].partition.locate(KEYS).values():
                assert set(shards) <= self.live
        for shards in self.snapshot.locate(KEYS).values():
            assert set(shards) <= self.live

    @rule()
    def settle(self) -> None:
        """With a quiet wire and no faults, a few exchanges make every location true."""
        self.wire.clear()
        for _ in range(2 * len(KEYS)):
            for name in sorted(self.live):
                messages = self.nodes[name].announcer.messages(heartbeat=True)
                for node, message in messages.items():
                    self.arrive(node, message, answer_lost=False)
        placement = Placement(self.live)
        truth = {
            key: {name for name in self.live if key in self.nodes[name].stored} for key in KEYS
        }
        for key in KEYS:
            partition = self.nodes[placement.owner(key)].partition
            assert set(partition.locate([key]).get(key, ())) == truth[key]
        for name in self.live:
            known = self.nodes[name].partition.locate(KEYS)
            assert all(placement.owner(key) == name for key in known)
            self.catch_up(name)
        assert {key: set(shards) for key, shards in self.snapshot.locate(KEYS).items()} == {
            key: shards for key, shards in truth.items() if shards
        }

    def teardown(self) -> None:
        self.settle()

    def catch_up(self, name: str) -> None:
        """As far as bounded steps go on bringing something."""
        while True:
            since = self.snapshot.positions()[name]
            changes = self.nodes[name].partition.changes(since, 3)
            self.snapshot.apply(name, changes)
            if changes.position == since:
                return


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def told(partition: DirectoryPartition, *keys: bytes, stream: str = "s", sequence: int = 0) -> bool:
    return partition.announce(Announcement("n0", stream, sequence, added=keys))


def test_a_full_partition_forgets_the_oldest_keys_and_counts_them() -> None:
    partition = DirectoryPartition("p", max_keys=4)
    partition.set_live({"n0"})
    assert told(partition, *KEYS[:6])
    assert list(partition.locate(KEYS)) == KEYS[2:6]
    assert partition.overflowed == 2


def test_a_late_message_of_a_former_stream_changes_nothing() -> None:
    partition = DirectoryPartition("p")
    partition.set_live({"n0"})
    told(partition, KEYS[0], stream="old")
    told(partition, KEYS[1], stream="new")
    assert not told(partition, KEYS[2], stream="old", sequence=1)
    assert set(partition.locate(KEYS)) == {KEYS[1]}


def exchange(announcer: Announcer, partition: DirectoryPartition, *, heartbeat: bool) -> None:
    while messages := announcer.messages(heartbeat=heartbeat):
        heartbeat = False
        (message,) = messages.values()
        announcer.answered("p0", message, accepted=partition.announce(message))


def test_a_restarted_partition_learns_everything_again_by_a_heartbeat() -> None:
    announcer = Announcer("n0", "first", batch_keys=BATCH_KEYS)
    announcer.set_nodes(["p0"])
    announcer.record(KEYS, ())
    for incarnation in ("p0#1", "p0#2"):
        partition = DirectoryPartition(incarnation)
        partition.set_live({"n0"})
        exchange(announcer, partition, heartbeat=True)
        assert set(partition.locate(KEYS)) == set(KEYS)


def test_a_restarted_shard_replaces_what_it_said_before() -> None:
    partition = DirectoryPartition("p0")
    partition.set_live({"n0"})
    for incarnation, keys in (("first", KEYS[:8]), ("second", KEYS[4:10])):
        announcer = Announcer("n0", incarnation, batch_keys=BATCH_KEYS)
        announcer.set_nodes(["p0"])
        announcer.hold(keys)
        exchange(announcer, partition, heartbeat=False)
        assert set(partition.locate(KEYS)) == set(keys)


def test_holding_other_keys_than_recorded_is_told_as_the_difference() -> None:
    partition = DirectoryPartition("p0")
    partition.set_live({"n0"})
    announcer = Announcer("n0", "first")
    announcer.set_nodes(["p0"])
    announcer.record(KEYS[:4], ())
    exchange(announcer, partition, heartbeat=False)
    announcer.hold(KEYS[2:6])
    (message,) = announcer.messages().values()
    assert (set(message.added), set(message.removed)) == (set(KEYS[4:6]), set(KEYS[:2]))


def test_a_gap_is_refused_and_a_repeated_message_is_not() -> None:
    partition = DirectoryPartition("p")
    partition.set_live({"n0"})
    assert told(partition, KEYS[0])
    assert told(partition, KEYS[0])
    assert not told(partition, KEYS[2], sequence=2)
    assert told(partition, KEYS[1], sequence=1)
    assert set(partition.locate(KEYS)) == set(KEYS[:2])


def test_a_reader_too_far_behind_is_shown_the_newest_keys_bit_by_bit() -> None:
    partition = DirectoryPartition("p", max_log=3, max_shown=7)
    partition.set_live({"n0"})
    told(partition, *KEYS[:10])
    shown, position = [], Position("p", 0)
    for fresh in (True, False, False):
        changes = partition.changes(position, limit=3)
        assert changes.fresh == fresh
        shown += [change.key for change in changes.changes]
        position = changes.position
    assert shown == KEYS[3:10]
    assert partition.changes(position, limit=3).changes == ()


def test_a_reader_that_begins_late_learns_all_whatever_changes_meanwhile() -> None:
    partition = DirectoryPartition("p")
    partition.set_live({"n0"})
    told(partition, *KEYS[:16])
    snapshot = DirectorySnapshot()
    snapshot.set_nodes({"n0"})
    for step in range(1, 8):
        snapshot.apply("n0", partition.changes(snapshot.positions()["n0"], limit=6))
        # One comes, and of those there already one goes: shown already or not.
        gone = KEYS[(5 * step) % 16]
        partition.announce(Announcement("n0", "s", step, (KEYS[15 + step],), (gone,)))
    assert snapshot.positions()["n0"].left == 0
    snapshot.apply("n0", partition.changes(snapshot.positions()["n0"], limit=6))
    assert snapshot.locate(KEYS) == partition.locate(KEYS)


def test_a_snapshot_keeps_the_newest_keys_within_its_bound() -> None:
    partition = DirectoryPartition("p")
    partition.set_live({"n0"})
    told(partition, *KEYS[:10])
    snapshot = DirectorySnapshot(max_keys=3)
    snapshot.set_nodes({"n0"})
    snapshot.apply("n0", partition.changes(Position(), limit=100))
    assert set(snapshot.locate(KEYS)) == set(KEYS[7:10])
    told(partition, KEYS[20], sequence=1)
    snapshot.apply("n0", partition.changes(snapshot.positions()["n0"], limit=100))
    assert set(snapshot.locate(KEYS)) == {*KEYS[8:10], KEYS[20]}
