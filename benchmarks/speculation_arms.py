"""What benchmarks of speculation measure with: one model, one engine per policy, timed answers.

All of them run in the calling thread, as a replica's one engine does in its own: a thread for each
would have an OpenMP team each, which slows every step (:mod:`rakv_cluster.model.threads`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.engine_rig import LIMITS, NAMESPACE, Answer
from benchmarks.speculation_tasks import Task
from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.engine.core import EngineCore
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.four_bit import four_bit_runner
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.reuse.workers import ThreadWorkers
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_files import CostIdentity, machine_name
from rakv_cluster.speculation.cost_model import CostTable
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.speculation.self_benchmark import seeded_costs
from rakv_cluster.speculation.self_draft import SelfDraft
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.types import ReuseMode, SamplingParams

_SAVER_QUEUE = 4096
_IDLE_S = 0.01


class CpuClock:
    """This process's CPU time: what one thread's work costs, whoever else uses the machine."""

    def monotonic_s(self) -> float:
        return time.process_time()

    def wall_s(self) -> float:
        return time.time()


class ClockedAnswer(Answer):
    """An answer whose times are those of the engine's clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(asked_s=clock.monotonic_s())
        self._clock = clock

    def __call__(self, event: EngineEvent) -> None:
        now_s = self._clock.monotonic_s()
        super().__call__(event)
        self.times_s[-1] = now_s


@dataclass(frozen=True, slots=True)
class Run:
    """One request served by one arm. ``decode_s`` is first to last token, ``total_s`` all of it."""

    token_ids: tuple[int, ...]
    decode_s: float
    total_s: float
    stats: RequestStats

    @classmethod
    def of(cls, answer: Answer) -> Run:
        """What an answer that has ended says."""
        stats = answer.events[-1].stats
        if stats is None:
            raise RuntimeError("the last event has no stats")
        return cls(
            tuple(token_id for event in answer.events for token_id in event.token_ids),
            answer.times_s[-1] - answer.times_s[0],
            answer.times_s[-1] - answer.asked_s,
            stats,
        )


class Policy:
    """A speculator and an engine of its own, which the caller steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: MemoryStore,
        speculator: Speculator,
        *,
        cuts: CutTable,
        clock: Clock,
    ) -> None:
        settings = EngineSettings()
        self.speculator = speculator
        self._woken = threading.Event()
        self._loaders = ThreadWorkers("bench-load", threads=settings.loader_threads, queue_limit=8)
        self._savers = ThreadWorkers("bench-save", threads=1, queue_limit=_SAVER_QUEUE)
        self._core = EngineCore(
            loaded.runner,
            store,
            speculator,
            cuts=cuts,
            limits=LIMITS,
            settings=settings,
            clock=clock,
            numeric_class=loaded.card.numeric_class,
            loaders=self._loaders,
            savers=self._savers,
            wake=self._woken.set,
            wait=self._woken.wait,
        )
        self._core.calibrate()

    def serve(self, request: EngineRequest, answer: Answer) -> None:
        """One request to its end, and all of its KV stored: nothing is left to disturb the next."""
        self._core.add(self._core.prepare(request, answer))
        while not answer.done.is_set():
            self._woken.clear()
            if not self._core.step():
                self._woken.wait(_IDLE_S)
        stored = threading.Event()
        self._savers.submit(stored.set)
        stored.wait()

    def close(self) -> None:
        """End its threads."""
        for workers in (self._loaders, self._savers):
            workers.close(timeout_s=10.0)


class SpeculationRig:
    """One loaded model and the policies that are compared on it, one request at a time."""

    def __init__(
        self, folder: Path, *, threads: int, cache_dir: Path, clock: Clock | None = None
    ) -> None:
        torch.set_num_threads(threads)
        self.loaded: LoadedModel = load_model(str(folder), threads=threads)
        self._cache_dir = cache_dir
        self.clock = clock or SystemClock()
        self._cuts = CutTable.from_tokenizer(self.loaded.tokenizer)
        self._store = MemoryStore(1 << 30, self.clock)
        self._policies: dict[str, Policy] = {}
        self._names = 0

    def costs(self) -> CostTable:
        """As a replica gets them at load: measured the first time, then from the cache folder."""
        card = self.loaded.card
        identity = CostIdentity(machine_name(), card.digest.hex(), card.numeric_class)
        return seeded_costs(
            self.loaded.runner, identity, cache_dir=self._cache_dir, clock=self.clock
        )

    def policy(
        self, name: str, mode: GovernorMode = GovernorMode.BUCKET, *, self_draft: bool = False
    ) -> Policy:
        """The policy of that name, made when first asked for, as at a replica's start."""
        if name not in self._policies:
            settings = ControllerSettings(governor=GovernorSettings(mode))
            drafter = self._self_draft() if self_draft else None
            self.start(name, Speculator(self.costs(), settings, self.clock, draft_model=drafter))
        return self._policies[name]

    def _self_draft(self) -> SelfDraft:
        drafter = SelfDraft(four_bit_runner(self.loaded.runner), self.clock)
        drafter.calibrate()
        return drafter

    def start(self, name: str, speculator: Speculator) -> Policy:
        """A policy of that name with this speculator."""
        self._policies[name] = Policy(
            self.loaded, self._store, speculator, cuts=self._cuts, clock=self.clock
        )
        return self._policies[name]

    def forget(self, name: str) -> None:
        """End a policy, if there is one; the next one of that name starts as after a load."""
        policy = self._policies.pop(name, None)
        if policy is not None:
            policy.close()

    def close(self) -> None:
        """End all policies."""
        for name in list(self._policies):
            self.forget(name)

    def serve(
        self,
        policy: Policy,
        task: Task,
        speculation: SpeculationMode,
        *,
        reuse: ReuseMode = ReuseMode.EXACT,
        sampling: SamplingParams | None = None,
    ) -> Run:
        """One request to its end."""
        self._names += 1
        request = EngineRequest(
            f"r{self._names}",
            chunk_prompt(NAMESPACE, [task.ids], self._cuts, LIMITS),
            task.max_tokens,
            sampling or SamplingParams(temperature=0.0),
            stop_token_ids=self.loaded.card.eos_token_ids,
            reuse=reuse,
            speculation=speculation,
        )
        answer = ClockedAnswer(self.clock)
        policy.serve(request, answer)
        return Run.of(answer.wait())


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy and what its requests ask for; a ``fresh`` one starts anew for every request, one
    with ``self_draft`` guesses by its own weights in four bits where the text offers nothing."""

    name: str
    speculation: SpeculationMode
    policy: str
    governor: GovernorMode = GovernorMode.BUCKET
    fresh: bool = False
    self_draft: bool = False


@dataclass(slots=True)
class Served:
    """All runs of one task, by arm, one per round."""

    task: Task
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def decode_s(self, arm: str) -> float:
        """Median decode time over the rounds."""
        times = sorted(run.decode_s for run in self.runs[arm])
        return (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2

    def ratio(self, arm: str, base: str) -> float:
        """``arm``'s decode time over ``base``'s."""
        return self.decode_s(arm) / self.decode_s(base)


def serve_all(
    rig: SpeculationRig,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    *,
    rounds: int,
    budget_s: float,
    note: Callable[[str], None],
) -> list[Served]:
    """Every task by every arm, arms interleaved; each task starts with another arm.

    A task's prompt is computed once before, and found in RAM by all arms. No task begins after
    ``budget_s``, but the first.
    """
    found: list[Served] = []
    began_s = time.perf_counter()
    for index, task in enumerate(tasks):
        if found and time.perf_counter() - began_s > budget_s:
            note(f"out of time: {len(tasks) - index} of {len(tasks)} prompts left out")
            break
        served = Served(task, {arm.name: [] for arm in arms})
        rig.serve(rig.policy("warm-up"), Task(task.category, task.name, task.ids, 1), "off")
        for turn in range(rounds):
            start = (index + turn) % len(arms)
            for arm in (*arms[start:], *arms[:start]):
                if arm.fresh:
                    rig.forget(arm.policy)
                policy = rig.policy(arm.policy, arm.governor, self_draft=arm.self_draft)
                served.runs[arm.name].append(rig.serve(policy, task, arm.speculation))
        found.append(served)
        note(f"{index + 1}/{len(tasks)} {task.category} {task.name}")
    return found
