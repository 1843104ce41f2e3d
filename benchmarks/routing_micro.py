"""How long one decision takes, and how many a second the simulator makes."""

from __future__ import annotations

import time

import numpy as np

from rakv_cluster.routing.hot_set import CAPACITY, encode_hot_set
from rakv_cluster.routing.policy import RoutePolicy, RouteRequest, RouteSettings
from rakv_cluster.routing.report import ReplicaReport
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.simulated_cluster import ClusterSettings, SimulatedCluster
from rakv_cluster.testing.traces import DocumentLoad, block_key, document_questions

_CHUNK_TOKENS = 128


def decision_us(replicas: int, *, chunks: int, rounds: int = 300) -> float:
    """Median processor microseconds to decide and book, every replica holding a part."""
    clock, rng = ManualClock(), np.random.default_rng(0)
    policy = RoutePolicy(RouteSettings(), clock, rng)
    ids = [f"r{number}" for number in range(replicas)]
    policy.view.set_replicas({name: f"n{i // 8}" for i, name in enumerate(ids)}, policy.now_s)
    keys = tuple(block_key(f"c{chunk}") for chunk in range(chunks))
    for name in ids:
        held = keys[: int(rng.integers(chunks))]
        others = [block_key(f"{name}/{number}") for number in range(CAPACITY - chunks)]
        policy.hear(
            name,
            ReplicaReport(
                backlog_ms=float(100 * rng.random()), open_requests=2.0, slots=16.0,
                prefill_ms=0.1, prefill_slope_ms=1e-6, ram_ms=0.001, disk_ms=0.01,
                remote_ms=0.02, chunk_ms=0.3, token_ms=20.0, token_ms_slope=0.5, hold_ms=2000.0,
                hot=encode_hot_set([*held, *others]),
            ),
        )  # fmt: skip
    holders = tuple((f"n{chunk % 3}", "n0") for chunk in range(chunks))
    durations = []
    for number in range(rounds):
        request = RouteRequest(
            request_id=f"q{number}",
            keys=keys,
            chunk_ends=np.arange(1, chunks + 1) * _CHUNK_TOKENS,
            prompt_tokens=(chunks + 1) * _CHUNK_TOKENS,
            output_tokens=100.0,
            holders=holders,
        )
        started = time.thread_time()
        decision = policy.decide(request)
        policy.book(request, decision, decision.order[0])
        durations.append(time.thread_time() - started)
        clock.advance(0.05)
    return 1e6 * float(np.median(durations))


def simulated_decisions_per_s(replicas: int, short: bool) -> float:
    """Decisions per processor second of the simulator under a load it can serve."""
    requests = (1000 if short else 4000) * (1 if replicas < 100 else 2)
    load = DocumentLoad(
        rate_per_s=4.0 * replicas, requests=requests, documents=20 * replicas,
        document_tokens=2048,
    )  # fmt: skip
    cluster = SimulatedCluster(ClusterSettings(replicas=replicas, replicas_per_node=8), seed=1)
    trace = list(document_questions(load, seed=1))
    started = time.process_time()
    cluster.run(trace)
    return cluster.decisions / (time.process_time() - started)
