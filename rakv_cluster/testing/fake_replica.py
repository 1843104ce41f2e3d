"""A replica on a node of a real Ray cluster, without weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import SystemClock
from rakv_cluster.cluster.service import open_node_store
from rakv_cluster.cluster.settings import ClusterStoreSettings
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.step import Step
from rakv_cluster.reuse.flights import FlightLimits
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.tiered import TieredStore
from rakv_cluster.testing.engine import LIMITS, NAMESPACE, Recording, no_cuts
from rakv_cluster.testing.fake_runner import FakeRunner


class _PacedRunner(FakeRunner):
    """Takes a while per forward, so that the others come while it computes."""

    def forward(self, step: Step) -> torch.Tensor:
        threading.Event().wait(0.05)
        return super().forward(step)


class FakeReplica:
    """An actor with a replica's engine: a model without weights, the node's real store.

    Waits for others' computing, and for its own answers, for up to ``patience_s``.
    """

    def __init__(self, settings: ClusterStoreSettings, name: str, patience_s: float) -> None:
        clock = SystemClock()
        # A busy machine must not look like a shard that does not answer.
        client = replace(
            settings.client, lookup_timeout_s=patience_s / 4, load_timeout_s=patience_s / 4
        )
        nodes = open_node_store(replace(settings, client=client), clock)
        self._name = name
        self._asked = 0
        self._patience_s = patience_s
        self._cuts = no_cuts(64)
        patient = FlightLimits(min_compute_ms=0.0, slack_s=patience_s, longest_s=patience_s)
        self._engine = Engine(
            _PacedRunner(),
            TieredStore(MemoryStore(1 << 24, clock), nodes),
            Speculator(CostTable(CostBuckets()), ControllerSettings(), clock),
            cuts=self._cuts,
            limits=LIMITS,
            settings=EngineSettings(
                max_step_tokens=16, price_loads=False, load_deadline_s=patience_s, flight=patient
            ),
            clock=clock,
            numeric_class="fake",
            flight=nodes,
        )
        self._engine.start(calibrate=False)

    def ready(self) -> bool:
        """Whether it serves."""
        return self._engine.healthy()

    def counters(self) -> tuple[int, int, int]:
        """Waits for other replicas, those given up, loads given up."""
        counters = self._engine.stats().counters
        return counters.flights_awaited, counters.flight_timeouts, counters.load_timeouts

    def ask(
        self, document: Sequence[int], questions: Sequence[Sequence[int]]
    ) -> list[tuple[list[int], int]]:
        """Ask all at once; each answer, and how many tokens of the document it computed."""
        asked = []
        for question in questions:
            prompt = chunk_prompt(NAMESPACE, [document, question], self._cuts, LIMITS)
            answer = _Awaited()
            self._asked += 1
            self._engine.submit(EngineRequest(f"{self._name}-{self._asked}", prompt, 4), answer)
            asked.append(answer)
        answers = []
        for question, answer in zip(questions, asked, strict=True):
            answer.wait(self._patience_s)
            computed = answer.recording.stats.computed_tokens
            answers.append((answer.recording.token_ids, max(computed - len(question), 0)))
        return answers


class _Awaited:
    """A sink that another thread waits on."""

    def __init__(self) -> None:
        self.recording = Recording(SystemClock())
        self.ended = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.recording(event)
        if event.finish is not None:
            self.ended.set()

    def wait(self, timeout_s: float) -> None:
        """Until the last event; raises ``TimeoutError``."""
        if not self.ended.wait(timeout_s):
            raise TimeoutError("a request does not end")
