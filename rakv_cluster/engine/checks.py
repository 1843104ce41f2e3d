"""What must hold between any two steps of an engine; tests call it after every one."""

from __future__ import annotations

from rakv_cluster.engine.sequence import Phase, Sequence
from rakv_cluster.kv.buffer import BufferPool


def check_state(
    waiting: list[Sequence],
    active: dict[int, Sequence],
    open_requests: dict[str, Sequence],
    pool: BufferPool,
) -> None:
    """Raise ``AssertionError`` naming the first invariant that is broken.

    Every open request is waiting or active, never both; the leased bytes are exactly the buffers
    of active ones, each its own, and within budget; lengths fit capacities and leave at least one
    token to compute; who waits for something has what it waits for.
    """
    _require(pool.leased_bytes <= pool.budget_bytes, "leases are within budget")
    places = [each.request.request_id for each in [*waiting, *active.values()]]
    _require(sorted(places) == sorted(open_requests), "a request is in exactly one place")
    buffers = [each.buffer for each in active.values() if each.buffer is not None]
    _require(len({id(buffer.data) for buffer in buffers}) == len(active), "one buffer each")
    _require(pool.leased_bytes == sum(each.nbytes for each in buffers), "no lease is lost")
    for sequence in waiting:
        _require(sequence.phase is Phase.WAITING, "queued sequences wait")
        _require(sequence.buffer is None, "waiting sequences hold no memory")
    for arrival, sequence in active.items():
        _require(sequence.arrival == arrival, "sequences are filed under their number")
        _check_active(sequence, active)


def _check_active(sequence: Sequence, active: dict[int, Sequence]) -> None:
    buffer = sequence.buffer
    _require(buffer is not None, "active sequences hold a buffer")
    if buffer is None:
        return
    _require(0 <= buffer.length <= buffer.capacity, "verified length fits the buffer")
    _require(buffer.length < sequence.count, "there is a token left to compute")
    _require(sequence.count <= len(sequence.ids), "tokens fit the request's limit")
    _require(sequence.phase not in (Phase.WAITING, Phase.DONE), "active sequences are active")
    _require((sequence.job is not None) == (sequence.phase is Phase.LOADING), "loading has a job")
    joining = sequence.phase is Phase.JOINING
    _require((sequence.donor is not None) == joining, "joining has a donor")
    if sequence.donor is not None:
        _require(active.get(sequence.donor.arrival) is sequence.donor, "a donor is active")
        _require(sequence.donor_tokens < sequence.count, "a share leaves the last token")
    _require(sequence.next_save <= len(sequence.chunked.chunks), "saves follow the chunks")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"broken invariant: {what}")
