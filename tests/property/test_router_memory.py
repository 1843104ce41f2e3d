"""A million distinct prefixes leave a router's memory bounded."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np

from rakv_cluster.routing.locations import LocationSettings
from rakv_cluster.routing.policy import RoutePolicy, RouteRequest, RouteSettings
from rakv_cluster.routing.report import ReplicaReport
from rakv_cluster.testing.clock import ManualClock

PREFIXES = 1_000_000
CHUNKS = 250
WARM_UP = 1000  # requests: all that is bounded is full then
GROWTH_LIMIT = 1 << 18


def policy(clock: ManualClock) -> RoutePolicy:
    made = RoutePolicy(RouteSettings(), clock, np.random.default_rng(0))
    made.view.set_replicas({"a": "n0", "b": "n1", "c": "n2"}, made.now_s)
    for name in made.view.ids:
        made.hear(
            name,
            ReplicaReport(
                backlog_ms=1.0, open_requests=1.0, slots=8.0, prefill_ms=0.1,
                prefill_slope_ms=0.0, ram_ms=0.001, disk_ms=0.01, remote_ms=0.02,
                chunk_ms=0.1, token_ms=5.0, token_ms_slope=0.1, hold_ms=100.0,
            ),
        )  # fmt: skip
    return made


def route(router: RoutePolicy, clock: ManualClock, number: int) -> None:
    """One request of chunks that nobody has seen, of a kind of its own, that never ends."""
    keys = tuple((number * CHUNKS + chunk).to_bytes(32, "little") for chunk in range(CHUNKS))
    request = RouteRequest(
        request_id=f"q{number}",
        keys=keys,
        chunk_ends=np.arange(1, CHUNKS + 1) * 64,
        prompt_tokens=CHUNKS * 64 + 1,
        output_tokens=10.0,
        kind=f"kind {number}",
        holders=tuple((f"n{number}", f"n{chunk % 11}") for chunk in range(CHUNKS)),
    )
    decision = router.decide(request)
    router.book(request, decision, decision.order[0])
    clock.advance(0.01)


def test_a_million_prefixes() -> None:
    clock = ManualClock()
    router = policy(clock)
    numbers = itertools.count()
    tracemalloc.start()
    for _ in range(WARM_UP):
        route(router, clock, next(numbers))
    _, before = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for _ in range(PREFIXES // CHUNKS - WARM_UP):
        route(router, clock, next(numbers))
    _, after = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert router.view.locations.predictions <= LocationSettings().max_predictions
    assert after - before < GROWTH_LIMIT
