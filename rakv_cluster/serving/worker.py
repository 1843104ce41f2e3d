"""The Worker deployment: a thin Serve shell around one :class:`Replica`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from rakv_cluster.clock import SystemClock
from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.model.card import ModelCard
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_model
from rakv_cluster.serving.replica import Replica
from rakv_cluster.serving.stores import open_store

log = logging.getLogger("ray.serve")


class Worker:
    """One model, one store, one engine thread."""

    def __init__(self, settings: Settings) -> None:
        clock = SystemClock()
        model = load_model(
            resolve(settings.model, settings.cache_path),
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads_per_replica,
        )
        store = open_store(settings, clock)
        self._replica = Replica(model, store, settings, clock)
        log.info("replica ready: %s, %s", model.card.model_id, model.card.numeric_class)

    async def describe(self) -> ModelCard:
        """See :meth:`Replica.describe`."""
        return await self._replica.describe()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """See :meth:`Replica.generate`; cancelling the handle call cancels the request."""
        events = self._replica.generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def stats(self) -> dict[str, float]:
        """See :meth:`Replica.stats`."""
        return await self._replica.stats()

    def check_health(self) -> None:
        """Serve replaces a replica whose check raises."""
        self._replica.check()

    def __del__(self) -> None:
        # Serve calls this when it stops a replica; a failed __init__ left nothing to close.
        replica = getattr(self, "_replica", None)
        if replica is not None:
            replica.close()
