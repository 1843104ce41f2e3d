"""A router's copy of the directory, over partitions that fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from rakv_cluster.cluster.breaker import BreakerLimits
from rakv_cluster.cluster.directory import Announcer, DirectoryPartition
from rakv_cluster.cluster.messages import ShardInfo
from rakv_cluster.cluster.peers import Answer, Call, Failed, Failure, Peers
from rakv_cluster.routing.directory_follower import DirectoryFollower
from rakv_cluster.testing.clock import ManualClock

NODES = ("n1", "n2")
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(40)]
Outcome = Answer[object] | Failed


class Directory:
    """A transport to two partitions and a shard's announcer; ``broken`` nodes answer ``fault``."""

    def __init__(self) -> None:
        self.partitions = {node: DirectoryPartition(f"{node}/1") for node in NODES}
        self.announcer = Announcer("n2", "n2/1")
        self.announcer.set_nodes(NODES)
        self.broken: dict[str, Outcome] = {}
        for partition in self.partitions.values():
            partition.set_live(NODES)

    def announce(self, added: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
        self.announcer.record(added, removed)
        for node, message in self.announcer.messages().items():
            accepted = self.partitions[node].announce(message)
            self.announcer.answered(node, message, accepted=accepted)

    def call(self, calls: Sequence[Call], timeout_s: float) -> list[Outcome]:
        return [self.broken.get(call.node) or Answer(self._answer(call)) for call in calls]

    def _answer(self, call: Call) -> object:
        if call.method == "info":
            return ShardInfo(call.node, "/", "1", 1, NODES)
        changes: Callable[..., object] = self.partitions[call.node].changes
        return changes(*call.args)


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def follower(directory: Directory) -> Iterator[DirectoryFollower]:
    peers = Peers(directory, BreakerLimits(), ManualClock())
    subject = DirectoryFollower("n1", peers, period_s=3600.0)
    yield subject
    subject.close()


def test_it_knows_what_was_announced_and_forgets_what_left(
    directory: Directory, follower: DirectoryFollower
) -> None:
    assert follower.holders(KEYS) == ()
    directory.announce(KEYS)
    follower.refresh()
    assert follower.holders(KEYS) == (("n2",),) * len(KEYS)

    directory.announce([], KEYS[3:4])
    follower.refresh()
    assert follower.holders(KEYS) == (("n2",),) * 3


def test_one_that_begins_late_learns_more_than_an_answer_holds(
    directory: Directory, follower: DirectoryFollower
) -> None:
    """Shards announce what is on their disks before an ingress starts."""
    many = [hashlib.sha256(b"%d" % number).digest() for number in range(12_000)]
    directory.announcer = Announcer("n2", "n2/1", batch_keys=len(many))
    directory.announcer.set_nodes(NODES)
    directory.announce(many)
    follower.refresh()
    assert len(follower.holders(many)) == len(many)


@pytest.mark.parametrize("fault", [Failed(Failure.LATE), Answer("garbage"), Answer(None)])
def test_a_partition_that_fails_leaves_its_part_as_it_was(
    directory: Directory, follower: DirectoryFollower, fault: Outcome
) -> None:
    directory.announce(KEYS[:20])
    follower.refresh()
    directory.announce(KEYS[20:])
    directory.broken["n2"] = fault
    follower.refresh()
    known = [key for key in KEYS if follower.holders([key])]
    assert set(KEYS[:20]) <= set(known)
    assert len(known) < len(KEYS)

    del directory.broken["n2"]
    follower.refresh()
    assert len(follower.holders(KEYS)) == len(KEYS)


def test_no_keys_are_nowhere(follower: DirectoryFollower) -> None:
    assert follower.holders([]) == ()
