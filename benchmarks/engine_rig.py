"""What benchmarks/engine.py measures with: an engine, timed answers, the stock model, memory."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import SystemClock
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.model.selection import DEFAULT_KERNELS, KernelOptions
from rakv_cluster.model.threads import aside
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.types import ReuseMode, SamplingParams

NAMESPACE = bytes(32)
LIMITS = ChunkLimits()
WAIT_S = 600.0


@dataclass(slots=True)
class Answer:
    """A request's events with the time each arrived; a sink."""

    asked_s: float = field(default_factory=time.perf_counter)
    events: list[EngineEvent] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: EngineEvent) -> None:
        self.times_s.append(time.perf_counter())
        self.events.append(event)
        self.first.set()
        if event.finish is not None:
            self.done.set()

    def wait(self) -> Answer:
        """Block until it ended; raises ``RuntimeError`` if it failed."""
        if not self.done.wait(WAIT_S) or self.events[-1].error:
            raise RuntimeError(f"request failed: {self.events[-1:]}")
        return self

    @property
    def ttft_s(self) -> float:
        """From asking to the first token."""
        return self.times_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens."""
        return [b - a for a, b in pairwise(self.times_s)]

    def tokens_between(self, start_s: float, stop_s: float) -> int:
        """Tokens that arrived in ``(start_s, stop_s]``."""
        pairs = zip(self.times_s, self.events, strict=True)
        return sum(len(event.token_ids) for at, event in pairs if start_s < at <= stop_s)


class Rig:
    """One model, an engine on it, and the same weights in a stock model."""

    def __init__(
        self,
        folder: Path,
        token_ids: Sequence[int],
        *,
        threads: int,
        kernels: KernelOptions = DEFAULT_KERNELS,
    ) -> None:
        torch.set_num_threads(threads)
        self.folder, self.threads = folder, threads
        self.loaded: LoadedModel = aside(
            lambda: load_model(str(folder), threads=threads, kernels=kernels)
        )
        self.stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self.cuts = CutTable.from_tokenizer(self.loaded.tokenizer)
        self.token_ids = token_ids
        self._offset = 0
        self._names = 0
        self._store = MemoryStore(1 << 30, SystemClock())
        self.engine = self.start(self._store)

    def start(self, store: ChunkStore, settings: EngineSettings | None = None) -> Engine:
        """A started engine on the model; the runner must not serve another at the same time."""
        engine = Engine(
            self.loaded.runner,
            store,
            Speculator(CostTable(CostBuckets()), ControllerSettings(), SystemClock()),
            cuts=self.cuts,
            limits=LIMITS,
            settings=settings or EngineSettings(),
            clock=SystemClock(),
            numeric_class=self.loaded.card.numeric_class,
            near_tie_eps=self.loaded.card.guarded_eps,
        )
        engine.start()
        return engine

    def ids(self, length: int) -> list[int]:
        """A run of text that was not used before (the text is a ring)."""
        start, self._offset = self._offset, self._offset + length
        return [self.token_ids[(start + i) % len(self.token_ids)] for i in range(length)]

    def ask(
        self,
        ids: Sequence[int],
        max_tokens: int,
        *,
        reuse: ReuseMode = ReuseMode.OFF,
        sampling: SamplingParams | None = None,
    ) -> Answer:
        """Submit a prompt; without drafts, which benchmarks.speculation measures."""
        self._names += 1
        prompt = chunk_prompt(NAMESPACE, [ids], self.cuts, LIMITS)
        answer = Answer()
        request = EngineRequest(
            f"r{self._names}",
            prompt,
            max_tokens,
            sampling or SamplingParams(),
            reuse=reuse,
            speculation="off",
        )
        self.engine.submit(request, answer)
        return answer

    def settle(self) -> None:
        """Wait until the engine is idle: it stores a request's KV after its last token."""
        while self.engine.stats().running:
            threading.Event().wait(0.005)

    def renew(self, ram_bytes: int) -> None:
        """Another engine in place of this one, with an empty RAM tier of so many bytes."""
        self.engine.stop()
        self._store.close()
        self._store = MemoryStore(ram_bytes, SystemClock())
        self.engine = self.start(self._store)

    def cancel(self, answer: Answer) -> None:
        """Cancel a request that has had its first token, and wait for its end."""
        self.engine.cancel(answer.events[0].request_id)
        answer.done.wait(WAIT_S)

    def throughput(self, requests: int, prompt_tokens: int, tokens: int) -> float:
        """Tokens per second of ``requests`` at once, while all of them decode."""
        answers = [self.ask(self.ids(prompt_tokens), tokens) for _ in range(requests)]
        for answer in answers:
            answer.wait()
        start_s = max(answer.times_s[0] for answer in answers)
        stop_s = min(answer.times_s[-1] for answer in answers)
        total = sum(answer.tokens_between(start_s, stop_s) for answer in answers)
        return total / (stop_s - start_s)


class TokenTimes(BaseStreamer):  # type: ignore[misc]  # transformers is untyped
    """A streamer that only notes when tokens come."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def generate_gap_s(stock: PreTrainedModel, ids: Sequence[int], tokens: int) -> float:
    """Median seconds between tokens of transformers' ``generate``."""
    streamer = TokenTimes()
    stock.generate(
        torch.tensor([list(ids)]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=streamer,
    )
    times = streamer.times_s[1:]
    return statistics.median(b - a for a, b in pairwise(times))


@torch.inference_mode()
def stock_prefill_s(stock: PreTrainedModel, ids: Sequence[int]) -> float:
    """Seconds of one stock forward over a prompt, last logits only."""
    tokens = torch.tensor([list(ids)])
    began_s = time.perf_counter()
    stock(input_ids=tokens, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - began_s


def weight_bytes(stock: PreTrainedModel) -> int:
    """Bytes of weights that one token's forward reads; a tied head counts once."""
    shared = {parameter.data_ptr(): parameter for parameter in stock.parameters()}
    return sum(each.numel() * each.element_size() for each in shared.values())


def read_seconds(nbytes: int) -> float:
    """Seconds to read ``nbytes`` of memory once with all threads, best of five."""
    block = torch.ones(nbytes // 4)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        block.sum()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def peak_mib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    """Resident size of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
