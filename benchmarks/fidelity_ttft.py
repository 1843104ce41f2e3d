"""Time to the first token of one prompt's documents in other orders, for benchmarks/fidelity.py.

One engine, one store in RAM. The documents are seeded in one order (and once more in another, from
which sensitivity is learned); every timed request has an order that was never seen, and what it
stored is removed again. Arms are interleaved in rounds.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.engine_rig import LIMITS, NAMESPACE, Answer
from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.chunking.ordering import cached_order
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import SystemClock
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineRequest, RequestStats
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.buffer import KvBuffer, Positions
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.drift import NO_DRIFT, Drift
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.blending import positions_to_compute
from rakv_cluster.reuse.fidelity import FidelityPrompt, Ids
from rakv_cluster.reuse.probing import probe_settings
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.types import BlendWish, ChunkedPrompt, ReuseMode


@dataclass(frozen=True, slots=True)
class Arm:
    """How one kind of request is asked; ``recompute`` and ``probe`` count under BLEND."""

    name: str
    reuse: ReuseMode
    recompute: float = 0.0
    probe: bool = False
    order: str = "unseen"
    new_in_front: bool = False


BLENDED = (0.0, 0.05, 0.15, 0.3)
"""Fractions that are timed."""

ARMS = (
    Arm("no cache", ReuseMode.OFF),
    Arm("prefix only", ReuseMode.EXACT),
    Arm("reorder", ReuseMode.EXACT, order="seen"),
    *(Arm(f"blend {fraction:.0%}", ReuseMode.BLEND, fraction) for fraction in BLENDED),
    Arm("blend 15%, probe", ReuseMode.BLEND, 0.15, probe=True),
    Arm("no cache, one new in front", ReuseMode.OFF, new_in_front=True),
    Arm("blend 5%, one new in front", ReuseMode.BLEND, 0.05, new_in_front=True),
    Arm("blend 15%, one new in front", ReuseMode.BLEND, 0.15, new_in_front=True),
)


SLOW_ARMS = ARMS[:2]
"""Timed in further rounds of their own: they differ by less than the machine does from one minute
to the next."""


@dataclass(slots=True)
class Timed:
    """Seconds of every round, and the last round's account."""

    seconds: list[float] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


def over(arm: Timed, base: Timed) -> float:
    """How many times as long as ``base`` an arm took: the median over rounds, each beside its own,
    because a shared machine's speed moves by a quarter within minutes."""
    pairs = zip(arm.seconds, base.seconds, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Times:
    """Median seconds of every arm; ``layers`` are the model's. ``following_s`` of "blend 15%" are
    spent on what is kept, which follows the repair."""

    medians: Mapping[str, float]
    layers: int
    following_s: float = 0.0

    @property
    def speedups(self) -> dict[str, float]:
        """Each arm's, over no cache for the same kind of prompt."""
        medians = self.medians
        base = {name: medians["no cache" + ", one new in front" * ("front" in name)]
                for name in medians}  # fmt: skip
        return {name: base[name] / seconds for name, seconds in medians.items()}

    @property
    def probe(self) -> float:
        """Its time as a share repaired."""
        spent_s = self.medians["blend 15%, probe"] - self.medians["blend 15%"]
        return max(spent_s, 0.0) / self._repair_s

    @property
    def following(self) -> float:
        """Its time as a share repaired."""
        return max(self.following_s, 0.0) / self._repair_s

    @property
    def check(self) -> float:
        """What finding layer-1 deviation takes as a share repaired: computing one layer of all
        that is not repaired. Derived from no cache, which computes all layers of it."""
        return (1 - 0.15) * self.medians["no cache"] / self.layers / self._repair_s

    def speedup(self, fraction: float, *, extra: float = 0.0) -> float:
        """Over no cache where ``fraction`` is repaired, and as much time as ``extra`` takes."""
        seconds = [self.medians[f"blend {each:.0%}"] for each in BLENDED]
        at = fraction + extra
        beyond_s = max(at - BLENDED[-1], 0.0) * self._repair_s
        return self.medians["no cache"] / (float(np.interp(at, BLENDED, seconds)) + beyond_s)

    @property
    def _repair_s(self) -> float:
        """Seconds to repair everything, by the slope between the ends."""
        spent_s = self.medians[f"blend {BLENDED[-1]:.0%}"] - self.medians["blend 0%"]
        return spent_s / BLENDED[-1]


class TtftRig:
    """Asks for one set of documents, cached in ``store``; ``fresh`` is a document that never is.

    With ``price_loads`` the engine loads where that should be faster than computing, else always.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompt: FidelityPrompt,
        fresh: Ids,
        store: ChunkStore,
        *,
        price_loads: bool,
    ) -> None:
        self._prompt, self._fresh = prompt, fresh
        self._cuts = CutTable.from_tokenizer(model.tokenizer)
        self._store = store
        self._engine = Engine(
            model.runner,
            self._store,
            Speculator(CostTable(CostBuckets()), ControllerSettings(), SystemClock()),
            cuts=self._cuts,
            limits=LIMITS,
            settings=EngineSettings(kv_budget_bytes=4 << 30, price_loads=price_loads),
            clock=SystemClock(),
            numeric_class=model.card.numeric_class,
            blending=BlendSupport(model.rotation, probe=probe_settings(model.card.layout.layers)),
        )
        self._engine.start()
        self._asked = 0
        self._seen = tuple(range(len(prompt.documents)))
        self._seeded: set[bytes] = set()

    def close(self) -> None:
        """Stop the engine."""
        self._engine.stop()

    def seed(self, *, orders: int = 2) -> None:
        """Compute and store the documents in the seen order; by a second one their sensitivity is
        learned."""
        seen = self._cut(self._seen, new_in_front=False)
        self._seeded = {chunk.prefix_key for chunk in seen.chunks}
        self._ask(seen, Arm("seed", ReuseMode.EXACT))
        if orders > 1:
            other = self._cut(self._seen[::-1], new_in_front=False)
            self._ask(other, Arm("seed", ReuseMode.EXACT))
            self._forget(other)

    def time(self, arms: Sequence[Arm], rounds: int, rng: np.random.Generator) -> dict[str, Timed]:
        """Every arm once per round, in an order of its own."""
        timed = {arm.name: Timed() for arm in arms}
        for _ in range(rounds):
            for index in rng.permutation(len(arms)):
                arm = arms[index]
                order = self._seen if arm.order == "seen" else self._unseen(rng)
                prompt = self._cut(order, new_in_front=arm.new_in_front)
                answer = self._ask(prompt, arm)
                timed[arm.name].seconds.append(answer.ttft_s)
                timed[arm.name].stats = answer.events[-1].stats or RequestStats()
                self._forget(prompt)
        return timed

    def order_ms(self, rng: np.random.Generator) -> float:
        """Milliseconds that finding the seen order takes an ingress."""
        order = self._unseen(rng)
        prompt = self._cut(order, new_in_front=False)
        places, start = [], len(self._prompt.front)
        for index in order:
            places.append((start, start + len(self._prompt.documents[index])))
            start = places[-1][1]
        began_s = time.perf_counter()
        found = cached_order(prompt, places, self._seeded.intersection)
        if tuple(order[i] for i in found) != self._seen:
            raise RuntimeError("the seen order was not found")
        return (time.perf_counter() - began_s) * 1e3

    def following_s(self, runner: Runner, rotation: KeyRotation, rounds: int = 9) -> float:
        """Seconds that it takes in the forwards of a repair of 15%: the median difference between
        pairs of them, with it and without."""
        start, stop = len(self._prompt.front), len(self._prompt.ids)
        lengths = [len(document) for document in self._prompt.documents]
        runs = np.repeat(np.arange(len(lengths) + 1), [start, *lengths]) - 1
        reused = np.arange(start, len(runs))
        computed = positions_to_compute(
            reused, reused[:: round(1 / 0.15)], covered=start, total=stop
        )
        buffer = KvBuffer(torch.zeros(runner.layout.shape(stop)))
        torch.nn.init.normal_(buffer.data)
        drift = Drift(rotation, runs, computed)
        pairs = [
            [_forwards_s(runner, buffer, computed, each) for each in (drift, NO_DRIFT)]
            for _ in range(rounds)
        ]
        return statistics.median(one - other for one, other in pairs)

    def _unseen(self, rng: np.random.Generator) -> tuple[int, ...]:
        """An order whose first document differs from both seeded ones'."""
        while True:
            order = tuple(int(index) for index in rng.permutation(len(self._seen)))
            if order[0] not in (self._seen[0], self._seen[-1]):
                return order

    def _cut(self, order: Sequence[int], *, new_in_front: bool) -> ChunkedPrompt:
        documents = [self._prompt.documents[index] for index in order]
        if new_in_front:
            # About a third is new, as many documents fewer are cached.
            documents = [self._fresh, *documents[len(documents) // 3 :]]
        # Another question each time: nothing behind the documents is ever cached.
        question = (5 + self._asked % 200, *self._prompt.question)
        segments = [self._prompt.front, *documents, question]
        return chunk_prompt(NAMESPACE, segments, self._cuts, LIMITS)

    def _ask(self, prompt: ChunkedPrompt, arm: Arm) -> Answer:
        self._asked += 1
        answer = Answer()
        request = EngineRequest(
            f"t{self._asked}",
            prompt,
            1,
            reuse=arm.reuse,
            blend=BlendWish(recompute=arm.recompute, probe=arm.probe),
            speculation="off",
        )
        self._engine.submit(request, answer)
        answer.wait()
        while self._engine.stats().running:
            threading.Event().wait(0.005)
        # Writes are off the critical path; the next request must not meet them half done. Of a
        # blend what stands in front of the first reused document is exact, and stored.
        exact_until = {
            ReuseMode.OFF: 0,
            ReuseMode.EXACT: len(prompt.token_ids),
            ReuseMode.BLEND: len(self._prompt.front) + arm.new_in_front * len(self._fresh),
        }[arm.reuse]
        for chunk in prompt.chunks:
            if chunk.start + len(chunk.token_ids) <= exact_until:
                self._await(chunk.prefix_key)
        return answer

    def _await(self, key: bytes) -> None:
        for _ in range(4000):
            if self._store.find([key]):
                return
            threading.Event().wait(0.005)
        raise RuntimeError("a chunk was not stored within 20 s")

    def _forget(self, prompt: ChunkedPrompt) -> None:
        keys = [chunk.prefix_key for chunk in prompt.chunks]
        self._store.delete([key for key in keys if key not in self._seeded])


def _forwards_s(runner: Runner, buffer: KvBuffer, positions: Positions, drift: Drift) -> float:
    """Seconds to compute any tokens there, in steps of 512."""
    began_s = time.perf_counter()
    for start in range(0, len(positions), 512):
        at = torch.from_numpy(positions[start : start + 512])
        span = Span(buffer, 0, len(at), int(at[0]), int(at[-1]), drift=drift)
        runner.forward(Step(at % 1000 + 10, at, (span,), torch.tensor([len(at) - 1])))
    return time.perf_counter() - began_s
