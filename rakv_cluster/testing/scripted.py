"""A whole service but for the engine: real HTTP application, tokenizer, cuts and keys; the answers
come from a function. For tests of what stands in front of replicas, in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from random import Random

from fastapi import FastAPI

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.clock import Clock
from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.model.card import ModelCard
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.service import Service
from rakv_cluster.serving.tracing import NO_TRACES, Tracer
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.testing.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, tiny_tokenizer
from rakv_cluster.types import FinishReason, ReuseMode

CARD = ModelCard(
    model_id="scripted",
    digest=bytes(32),
    context_tokens=1 << 20,
    vocab_size=VOCAB_SIZE,
    layout=KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32"),
    eos_token_ids=frozenset({2}),
    numeric_class="scripted",
    self_check_error=0.0,
    near_tie_eps=0.0,
)


class ScriptedBackend:
    """Answers with ``answer(prompt text)``, ``step_tokens`` at a time; raises what that raises.

    It keeps no KV but remembers every chunk's prefix key, and reports as reused what an unbounded
    exact cache would have had. ``requests`` and ``cancelled`` record what came and what was left
    before its end; ``figures`` are what its one replica reports.
    """

    def __init__(
        self, answer: Callable[[str], str] = lambda prompt: "answer", *, step_tokens: int = 4
    ) -> None:
        self.requests: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.started = asyncio.Event()
        self.figures: dict[str, float | Mapping[str, float]] = {"engine_running": 0.0}
        self._answer = answer
        self._step_tokens = step_tokens
        self._tokenizer = tiny_tokenizer()
        self._cached: set[bytes] = set()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()

    def hold(self) -> None:
        """Let requests wait behind their first token until :meth:`go_on`."""
        self._may_go_on.clear()

    def go_on(self) -> None:
        """End :meth:`hold`."""
        self._may_go_on.set()

    async def describe(self) -> ModelCard:
        return CARD

    async def stats(self) -> dict[str, Figures]:
        return {"scripted": self.figures}

    async def forget(self, keys: Sequence[bytes]) -> None:
        self._cached.difference_update(keys)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.requests.append(request)
        self.started.set()
        prompt = self._tokenizer.decode(request.prompt.token_ids)
        text = self._answer(prompt)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        finish = FinishReason.LENGTH if len(ids) > request.max_tokens else FinishReason.STOP
        ids = ids[: request.max_tokens]
        stats = self._account(request, len(ids))
        finished = False
        try:
            for start in range(0, len(ids), self._step_tokens):
                yield EngineEvent(
                    request.request_id, tuple(ids[start : start + self._step_tokens]), stats=stats
                )
                await self._may_go_on.wait()
            finished = True
            yield EngineEvent(request.request_id, (), finish=finish, stats=stats)
        finally:
            if not finished:
                self.cancelled.append(request.request_id)

    def _account(self, request: EngineRequest, output_tokens: int) -> RequestStats:
        chunks = request.prompt.chunks
        reused = 0
        if request.reuse is not ReuseMode.OFF:
            for chunk in chunks:
                if chunk.prefix_key not in self._cached:
                    break
                reused = min(chunk.end, len(request.prompt.token_ids) - 1)
            self._cached |= {chunk.prefix_key for chunk in chunks}
        total = len(request.prompt.token_ids)
        return RequestStats(
            prompt_tokens=total,
            ram_tokens=reused,
            computed_tokens=total - reused,
            output_tokens=output_tokens,
        )


def scripted_service(
    backend: ScriptedBackend,
    settings: Settings,
    clock: Clock,
    *,
    tracer: Tracer = NO_TRACES,
    chat_template: str = CHAT_TEMPLATE,
    ended: Callable[[str, str, int], None] = lambda endpoint, tenant, output_tokens: None,
) -> Service:
    """The ingress's service in front of ``backend``."""
    tokenizer = tiny_tokenizer(chat_template)
    return Service(
        settings=settings,
        backend=backend,
        card=CARD,
        renderer=PromptRenderer(tokenizer),
        cuts=CutTable.from_tokenizer(tokenizer),
        clock=clock,
        seeds=Random(0),
        tracer=tracer,
        ended=ended,
    )


def scripted_app(backend: ScriptedBackend, settings: Settings, clock: Clock) -> FastAPI:
    """The HTTP application in front of ``backend``; for ``httpx.ASGITransport``."""
    return create_app(scripted_service(backend, settings, clock), ServiceMetrics())
