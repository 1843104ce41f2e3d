"""Engine measurements that need more than one engine: the whole service, and other numerics."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.engine_rig import Rig
from rakv_cluster.cli.local_service import LocalService, local_service
from rakv_cluster.clock import SystemClock
from rakv_cluster.engine.stats import Counters
from rakv_cluster.model.selection import KernelOptions
from rakv_cluster.types import SamplingParams

if TYPE_CHECKING:
    from benchmarks.engine import Report, Scale

STREAMS = 8
PROMPT_TOKENS = 64


def service(rig: Rig, scale: Scale, report: Report) -> None:
    """Decode of 8 streams over HTTP against the engine alone, by turns."""
    alone, over_http = [], []
    tokens = 2 * scale.tokens
    with _service(rig.folder) as running:
        _stream_rate(running, rig, tokens)  # not counted: warms the processes
        for _ in range(scale.rounds):
            alone.append(rig.throughput(STREAMS, PROMPT_TOKENS, tokens))
            over_http.append(_stream_rate(running, rig, tokens))
    report.add("8 streams tokens/s, engine alone", statistics.median(alone))
    report.add("8 streams tokens/s, over HTTP", statistics.median(over_http))
    ratio = statistics.median(b / a for a, b in zip(alone, over_http, strict=True))
    report.add("8 streams over HTTP / engine alone", ratio, ">=", 0.7)


def guard(rig: Rig, scale: Scale, report: Report) -> None:
    """Near-ties that were decided again, and what that took, under numerics that are not uniform.

    Four requests at once, so that every step but a replay's has several rows.
    """
    kernels = KernelOptions(numerics="fast")
    fast = Rig(rig.folder, rig.token_ids, threads=rig.threads, kernels=kernels)
    engine = fast.engine
    report.add("near-tie eps, fast numerics", fast.loaded.card.guarded_eps)
    samplings = {
        "greedy": SamplingParams(),
        "top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    }
    for name, sampling in samplings.items():
        before = engine.stats().counters
        for _ in range(scale.rounds):
            answers = [
                fast.ask(fast.ids(PROMPT_TOKENS), 4 * scale.tokens, sampling=sampling)
                for _ in range(4)
            ]
            for answer in answers:
                answer.wait()
        _report_guard(name, before, engine.stats().counters, report)
    engine.stop()


def _report_guard(name: str, before: Counters, after: Counters, report: Report) -> None:
    per_thousand = 1000 / (after.output_tokens - before.output_tokens)
    replays = (after.replays - before.replays) * per_thousand
    report.add(f"guard: replays per 1,000 tokens, {name}", replays)
    ms = (after.replay_ms - before.replay_ms) * per_thousand
    report.add(f"guard: replay ms per 1,000 tokens, {name}", ms)


@contextmanager
def _service(model: Path) -> Iterator[LocalService]:
    flags = {"model": str(model), "set": "store=memory"}
    with (
        tempfile.TemporaryDirectory(prefix="rakv-engine-") as folder,
        local_service(flags, log=Path(folder) / "serve.log", clock=SystemClock()) as running,
    ):
        yield running


def _stream_rate(running: LocalService, rig: Rig, tokens: int) -> float:
    """Tokens per second while all streams decode; every chunk carries one token."""
    url = f"{running.base_url}/v1/completions"
    bodies = [_body(rig.ids(PROMPT_TOKENS), tokens) for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = list(threads.map(lambda body: _stream(url, body), bodies))
    start_s = max(times[0] for times in streams)
    stop_s = min(times[-1] for times in streams)
    total = sum(start_s < at <= stop_s for times in streams for at in times)
    return total / (stop_s - start_s)


def _stream(url: str, body: dict[str, object]) -> list[float]:
    """When each chunk of one SSE stream arrived."""
    times = []
    with httpx.stream("POST", url, json=body, timeout=600.0) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
    return times


def _body(ids: Sequence[int], tokens: int) -> dict[str, object]:
    return {
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "speculation": "off",
        "reuse": "off",
    }
