"""A batch's rows by an engine in this process: no service, no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from random import Random

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.client import Answer, Document, Message, Options
from rakv_cluster.clock import Clock
from rakv_cluster.config import Settings
from rakv_cluster.serving.auth import ANONYMOUS
from rakv_cluster.serving.backend import Backend
from rakv_cluster.serving.openai_models import ChatRequest, validated
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.replica import Replica, load_served_model
from rakv_cluster.serving.run import Run
from rakv_cluster.serving.service import Service
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.telemetry import ServiceMetrics


class LocalEngine:
    """Answers chats as a service with these settings would; belongs to one event loop."""

    def __init__(self, service: Service, clock: Clock) -> None:
        self._service = service
        self._metrics = ServiceMetrics()
        self._clock = clock

    async def chat(
        self, messages: Sequence[Message], documents: Sequence[Document], options: Options
    ) -> Answer:
        """One answer; raises the error tree's classes, as a client does."""
        started_s = self._clock.monotonic_s()
        fields = {
            **options,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "documents": [{"id": d.id, "text": d.text} for d in documents],
        }
        prepared = await self._service.prepare(validated(ChatRequest, fields))
        run = Run(
            self._service, self._metrics, prepared, ANONYMOUS, endpoint="chat", started_s=started_s
        )
        pieces: list[str] = []
        reason = ""
        async with aclosing(run.updates()) as updates:
            async for update in updates:
                pieces.append(update.text)
                reason = update.finish_reason or reason
        return Answer(
            text="".join(pieces),
            finish_reason=reason,
            ttft_s=run.totals.ttft_ms / 1e3,
            total_s=run.elapsed_ms() / 1e3,
            usage=run.totals.usage(),
            rakv=run.totals.rakv(run.elapsed_ms()),
        )


@asynccontextmanager
async def local_engine(settings: Settings, clock: Clock) -> AsyncIterator[LocalEngine]:
    """Load the model and serve it while the context lasts. KV is kept in RAM, unless the settings
    say ``store: none``. Raises :class:`ConfigError` for a model that cannot be loaded."""
    model = load_served_model(settings.model, settings)
    memory = MemoryStore(int(settings.ram_budget_bytes), clock)
    replica = Replica(model, NullStore() if settings.store == "none" else memory, settings, clock)
    backend: Backend = replica
    try:
        yield LocalEngine(
            Service(
                settings=settings,
                backend=backend,
                card=model.card,
                renderer=PromptRenderer(model.tokenizer),
                cuts=CutTable.from_tokenizer(model.tokenizer),
                clock=clock,
                seeds=Random(),
            ),
            clock,
        )
    finally:
        replica.close()
