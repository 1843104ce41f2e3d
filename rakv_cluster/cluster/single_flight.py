"""Computing a missing record once in the whole cluster: the client's side of the leases."""

from __future__ import annotations

from collections.abc import Sequence

from rakv_cluster.cluster.messages import parse_flag, parse_leases
from rakv_cluster.cluster.peers import Answer, Call, Peers
from rakv_cluster.cluster.placement import Placement
from rakv_cluster.store.flight import Claim


def claim(
    peers: Peers,
    placement: Placement,
    keys: Sequence[bytes],
    holder: str,
    *,
    ttl_s: float,
    timeout_s: float,
) -> Claim:
    """Ask the owners of ``keys`` for leases; without an answer the key is the caller's to compute.

    ``holder`` names the request, not the process: two requests of one process exclude each other.
    """
    groups = placement.group(keys)
    calls = [Call(node, "acquire", (group, holder, ttl_s)) for node, group in groups.items()]
    theirs: dict[bytes, float] = {}
    for call, outcome in zip(calls, peers.ask(calls, timeout_s, parse_leases), strict=True):
        leases = outcome.value if isinstance(outcome, Answer) else {}
        theirs |= {
            key: min(lease.remaining_s, ttl_s)
            for key, lease in leases.items()
            if lease.holder != holder and key in groups[call.node]
        }
    return Claim(tuple(key for key in keys if key not in theirs), theirs)


def release(
    peers: Peers, placement: Placement, keys: Sequence[bytes], holder: str, *, timeout_s: float
) -> None:
    """Give leases back; where an owner does not answer they end by themselves."""
    calls = [
        Call(node, "release", (group, holder)) for node, group in placement.group(keys).items()
    ]
    peers.ask(calls, timeout_s, parse_flag)
