"""Routing rules of others, for :mod:`benchmarks.routing`.

All see the true number of open requests and tokens of every replica, where our router has reports
of up to a second ago, and all share our router's knowledge of what is in which replica's RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rakv_cluster.routing.policy import RoutePolicy, RouteRequest
from rakv_cluster.routing.score import Reach
from rakv_cluster.testing.simulated_worker import SimulatedWorker

Workers = Sequence[SimulatedWorker]

_BELIEVED_S = 5.0


def _least(workers: Workers, loads: Sequence[float], rng: np.random.Generator) -> str:
    """A worker with the lowest load, any of equals."""
    lowest = np.flatnonzero(np.asarray(loads) == min(loads))
    return workers[int(lowest[rng.integers(len(lowest))])].name


def _matched_tokens(request: RouteRequest, policy: RoutePolicy, workers: Workers) -> list[int]:
    """Tokens of the leading chunks in each worker's RAM, as the router believes."""
    now_s = policy.now_s
    in_ram = policy.view.locations.reach(request.keys, (), now_s) == Reach.RAM
    ends = np.concatenate(([0], request.chunk_ends))
    matched = ends[np.logical_and.accumulate(in_ram, axis=1).sum(axis=1)]
    return [int(matched[policy.view.index[worker.name]]) for worker in workers]


def _predict(request: RouteRequest, policy: RoutePolicy, name: str) -> str:
    """Remember that a worker will hold the request's chunks; returns its name."""
    until_s = policy.now_s + _BELIEVED_S
    policy.view.locations.predict(request.keys, policy.view.index[name], until_s)
    return name


class RoundRobin:
    """Each in turn."""

    def __init__(self, seed: int) -> None:
        self._turn = seed

    def __call__(self, request: RouteRequest, policy: RoutePolicy, workers: Workers) -> str:
        self._turn += 1
        return workers[self._turn % len(workers)].name


class PowerOfTwo:
    """The less loaded of two at random (Mitzenmacher, 2001); Serve's default."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, request: RouteRequest, policy: RoutePolicy, workers: Workers) -> str:
        pair = self._rng.choice(len(workers), min(2, len(workers)), replace=False)
        return min((workers[int(index)] for index in pair), key=lambda w: w.open_requests).name


class LeastLoaded:
    """Fewest open requests."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, request: RouteRequest, policy: RoutePolicy, workers: Workers) -> str:
        return _least(workers, [worker.open_requests for worker in workers], self._rng)


class LongestMatch:
    """Longest cached prefix; of equals, fewest open requests."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, request: RouteRequest, policy: RoutePolicy, workers: Workers) -> str:
        matched = _matched_tokens(request, policy, workers)
        longest = max(matched)
        best = [w for w, tokens in zip(workers, matched, strict=True) if tokens == longest]
        name = _least(best, [worker.open_requests for worker in best], self._rng)
        return _predict(request, policy, name)


class BlockCost:
    """NVIDIA Dynamo's KV router: overlap weight (1) x blocks to prefill + blocks held."""

    def __init__(self, seed: int, *, block_tokens: int = 512) -> None:
        self._rng = np.random.default_rng(seed)
        self._block_tokens = block_tokens

    def __call__(self, request: RouteRequest, policy: RoutePolicy, workers: Workers) -> str:
        matched = _matched_tokens(request, policy, workers)
        costs = [
            (worker.waiting_tokens + 2 * request.prompt_tokens - tokens + worker.open_tokens)
            / self._block_tokens
            for worker, tokens in zip(workers, matched, strict=True)
        ]
        return _predict(request, policy, _least(workers, costs, self._rng))


class CacheAware:
    """SGLang's router: shortest queue if imbalanced (by 64 and 1.5x), else the longest match in a
    tree of what was sent where if it is over 0.3, else the smallest tree."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._sent: dict[bytes, set[str]] = {}
        self._tree_tokens: dict[str, int] = {}

    def __call__(self, request: RouteRequest, policy: RoutePolicy, workers: Workers) -> str:
        loads = [worker.open_requests for worker in workers]
        matched = [self._match(request, worker.name) for worker in workers]
        best = int(np.argmax(matched))
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            name = _least(workers, loads, self._rng)
        elif matched[best] > 0.3 * request.prompt_tokens:
            name = workers[best].name
        else:
            sizes = [self._tree_tokens.get(worker.name, 0) for worker in workers]
            name = _least(workers, sizes, self._rng)
        self._insert(request, name)
        return name

    def _match(self, request: RouteRequest, name: str) -> int:
        matched = 0
        for key, end in zip(request.keys, request.chunk_ends.tolist(), strict=True):
            if name not in self._sent.get(key, ()):
                break
            matched = end
        return matched

    def _insert(self, request: RouteRequest, name: str) -> None:
        tokens = request.prompt_tokens - self._match(request, name)
        self._tree_tokens[name] = self._tree_tokens.get(name, 0) + tokens
        for key in request.keys:
            self._sent.setdefault(key, set()).add(name)


PEERS = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "least loaded": LeastLoaded,
    "longest match": LongestMatch,
    "block cost": BlockCost,
    "cache aware": CacheAware,
}
