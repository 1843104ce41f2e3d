"""A disk that reads more slowly than the model computes, for benchmarks/fidelity.py.

Everything is cached, on a disk slowed to :data:`BYTES_PER_S`. Loads are priced, as they are in a
service: the first request on that disk finds out how slow it is, the later ones must compute.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import Requirement, table
from benchmarks.fidelity_ttft import Arm, Timed, TtftRig, over
from rakv_cluster.clock import SystemClock
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.reuse.fidelity import FidelityPrompt
from rakv_cluster.store.base import ChunkStore, Found, Loaded, LoadItem, StoreStats
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.types import ReuseMode, Tier

BYTES_PER_S = 2_000_000
"""Some tenth of the speed below which loading SmolLM2's KV takes longer than computing it."""

ROUNDS = 25
ALLOWED = 1.02
BASE = Arm("no cache", ReuseMode.OFF)
ARMS = (
    Arm("prefix, throttled disk", ReuseMode.EXACT, order="seen"),
    Arm("blend 15%, throttled disk", ReuseMode.BLEND, 0.15),
)


@dataclass(frozen=True, slots=True)
class ThrottledStore:
    """``inner`` as a disk that reads :data:`BYTES_PER_S`."""

    inner: ChunkStore

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        found = self.inner.find(keys)
        return {key: replace(each, tier=Tier.DISK) for key, each in found.items()}

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        outcomes = self.inner.load(items)
        size = sum(outcome.stored_bytes for outcome in outcomes if outcome.ok)
        threading.Event().wait(size / BYTES_PER_S)
        return [replace(outcome, tier=Tier.DISK) for outcome in outcomes]

    def donors(self, contents: Sequence[bytes]) -> dict[bytes, bytes]:
        return self.inner.donors(contents)

    def put(self, records: Sequence[ChunkRecord]) -> int:
        return self.inner.put(records)

    def delete(self, keys: Sequence[bytes]) -> int:
        return self.inner.delete(keys)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


def throttled(
    model: LoadedModel, prompt: FidelityPrompt, seed: int
) -> tuple[dict[str, Any], list[Requirement]]:
    """Time the arms, print them, and hold each to the bound against no cache."""
    rng = np.random.default_rng(seed)
    store = ThrottledStore(MemoryStore(1 << 30, SystemClock()))
    rig = TtftRig(model, prompt, (), store, price_loads=True)
    try:
        rig.seed(orders=1)
        first = rig.time(ARMS, 1, rng)
        timed = rig.time((BASE, *ARMS), ROUNDS, rng)
    finally:
        rig.close()
    base = timed[BASE.name].seconds
    base_s = statistics.median(base)
    rows, report, requirements = [], {}, []
    for arm in ARMS:
        each, sight_s = timed[arm.name], first[arm.name].seconds[0]
        ratio = over(each, timed[BASE.name])
        rows.append([arm.name, _loaded(each), statistics.median(each.seconds), ratio, sight_s])
        report[arm.name] = {
            "seconds": each.seconds, "no_cache_seconds": base, "over_no_cache": ratio,
            "first_sight_seconds": sight_s, "loaded_tokens": _loaded(each),
        }  # fmt: skip
        requirements.append(Requirement(f"TTFT, {arm.name}, over no cache", ratio, "<=", ALLOWED))
    print(f"a disk that reads {BYTES_PER_S / 1e6:.0f} MB/s; no cache takes {base_s:.3f} s")
    headings = ["arm", "tokens loaded", "median s", "over no cache", "s where it was found out"]
    print(table(rows, headings))
    return report, requirements


def _loaded(timed: Timed) -> int:
    """Tokens that the last round took from the store."""
    return timed.stats.cached_tokens
