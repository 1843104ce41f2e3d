"""Replicas and nodes that come under load: how soon they take work.

    python -m benchmarks.nodes [--short] [--json F] [--check] [--seed N] [--model M]

A Ray cluster of three nodes on this machine, a replica of one thread on each, and clients that ask
without pause, each question about another document. By turns, a replica is killed and its node
removed; Serve starts another in its place, on the same node or on one that is added. Printed are
the seconds from the moment Serve says that it runs until it has taken in its first request, and
those from the kill or from the node's joining, which hold the start of a process and the loading of
the model. The baseline: a request to a replica at work takes as long as `answer` says. Starts Ray:
run it in a loopback-only network namespace (scripts/loopback). About 4 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import Options, Requirement, finish, parse_options, table
from rakv_cluster.client import Client
from rakv_cluster.clock import SystemClock
from rakv_cluster.testing.served_cluster import ServedCluster, served_cluster
from rakv_cluster.testing.traffic import traffic
from rakv_cluster.testing.waiting import eventually

CLOCK = SystemClock()
NODES, CLIENTS = 3, 6
BOUND_S = 5.0
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A replica that came: seconds from its cause until it ran, and from then to its first work."""

    cause: str
    start_s: float
    work_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="what to serve")
    options, names = parse_options(__doc__ or "", argv, extra=extra)
    rounds = 1 if options.short else 5
    rng = random.Random(options.seed)
    settings = {"model": names.model, "store": "memory", "max_running": 2}
    with (
        tempfile.TemporaryDirectory(prefix="rakv-nodes-") as folder,
        served_cluster(NODES, settings, Path(folder)) as service,
        asking(service) as answers_s,
    ):
        arrivals = [
            arrival for _ in range(rounds) for arrival in (_replica(service, rng), _node(service))
        ]
    return _report(options, arrivals, answers_s)


def _replica(service: ServedCluster, rng: random.Random) -> Arrival:
    known = set(service.taken())
    os.kill(rng.choice(service.workers()), signal.SIGKILL)
    started_s = CLOCK.monotonic_s()
    _wait(lambda: service.running() < NODES)
    return _arrival("replica replaced", service, known, started_s)


def _node(service: ServedCluster) -> Arrival:
    service.remove_node()
    _wait(lambda: service.running() < NODES)
    known = set(service.taken())
    started_s = CLOCK.monotonic_s()
    service.add_node()
    return _arrival("node added", service, known, started_s)


def _arrival(cause: str, service: ServedCluster, known: set[str], started_s: float) -> Arrival:
    _wait(lambda: service.running() == NODES)
    runs_s = CLOCK.monotonic_s()
    _wait(lambda: any(count for name, count in service.taken().items() if name not in known))
    return Arrival(cause, runs_s - started_s, CLOCK.monotonic_s() - runs_s)


def _wait(condition: Callable[[], bool]) -> None:
    eventually(condition, "a replica comes or goes", timeout_s=PATIENCE_S)


@contextmanager
def asking(service: ServedCluster) -> Iterator[list[float]]:
    """Clients that ask one question after another; yields the seconds that each answer took."""
    answers_s: list[float] = []
    with Client(service.url, clock=CLOCK) as http:

        def ask(client: int, number: int) -> None:
            text = f"{client} {number} " * 40
            answers_s.append(http.chat(text, max_tokens=16, ignore_eos=True).total_s)

        with traffic(CLIENTS, ask):
            yield answers_s


def _report(options: Options, arrivals: Sequence[Arrival], answers_s: Sequence[float]) -> int:
    rows = [[each.cause, each.start_s, each.work_s] for each in arrivals]
    print(table(rows, ["cause", "start s", "first work s"]))
    print(f"{len(answers_s)} answers, none failed; median {statistics.median(answers_s):.2f} s")
    requirements = [
        Requirement(
            f"{cause}: median seconds from running to its first work",
            statistics.median(each.work_s for each in arrivals if each.cause == cause),
            "<=",
            BOUND_S,
        )
        for cause in ("replica replaced", "node added")
    ]
    results = {"arrivals": [asdict(each) for each in arrivals], "answers_s": list(answers_s)}
    return finish(options, results, requirements)


if __name__ == "__main__":
    sys.exit(main())
