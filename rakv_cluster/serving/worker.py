"""The Worker deployment: a thin Serve shell around one :class:`Replica`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from ray import serve

from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.logs import configure_logs
from rakv_cluster.model.card import ModelCard
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.make_draft import known_agreement
from rakv_cluster.routing.autoscaling import BACKLOG_MS, BUSY_SHARE, OCCUPANCY
from rakv_cluster.routing.report import encode_report
from rakv_cluster.routing.ticket import RouteTicket
from rakv_cluster.serving.replica import Replica, load_served_model
from rakv_cluster.serving.stores import ReplicaStore, open_store
from rakv_cluster.speculation.draft_model import UNKNOWN_AGREEMENT
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.warm_up import WarmUpLimits, warm_up
from rakv_cluster.telemetry import Figures

log = logging.getLogger("ray.serve")

_WARM_SHARE = 0.5
"""Of RAM; the rest is left to what the replica's own requests bring."""


class Worker:
    """One model, one store, one engine thread."""

    def __init__(self, settings: Settings) -> None:
        configure_logs(settings.log_format)
        clock = SystemClock()
        model = load_served_model(settings.model, settings)
        draft = load_served_model(settings.draft_model, settings) if settings.draft_model else None
        memory = MemoryStore(int(settings.ram_budget_bytes), clock)
        opened = open_store(settings, memory, clock)
        _warm_up(opened, model.runner.layout, settings, clock)
        self._clock = clock
        self._replica = Replica(
            model,
            opened.store,
            settings,
            clock,
            flight=opened.flight,
            newest_keys=memory.newest,
            draft=draft,
            draft_agreement=known_agreement(
                Path(resolve(settings.draft_model, settings.cache_path)), UNKNOWN_AGREEMENT
            ),
            name=serve.get_replica_context().replica_id.unique_id,
        )
        log.info("replica ready: %s, %s", model.card.model_id, model.card.numeric_class)

    async def describe(self) -> ModelCard:
        """See :meth:`Replica.describe`."""
        return await self._replica.describe()

    async def generate(
        self, request: EngineRequest, ticket: RouteTicket
    ) -> AsyncGenerator[EngineEvent, None]:
        """See :meth:`Replica.generate`; cancelling the handle call cancels the request.

        ``ticket`` has served its purpose before the call: it was for the router.
        """
        events = self._replica.generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def route_only(self, request: EngineRequest, ticket: RouteTicket) -> None:
        """Do nothing: the caller wants to know how its router decides."""

    def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks once a second and passes it on to the routers."""
        return encode_report(self._replica.routing_report(), self._clock.wall_s())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks before it asks how many replicas there should be."""
        load = self._replica.load()
        return {
            BACKLOG_MS: load.backlog_ms,
            OCCUPANCY: load.occupancy,
            BUSY_SHARE: load.busy_share,
        }

    async def stats(self) -> dict[str, Figures]:
        """See :meth:`Replica.stats`."""
        return await self._replica.stats()

    async def forget(self, keys: Sequence[bytes]) -> None:
        """See :meth:`Replica.forget`."""
        await self._replica.forget(keys)

    def check_health(self) -> None:
        """Serve replaces a replica whose check raises."""
        self._replica.check()

    def __del__(self) -> None:
        # Serve calls this when it stops a replica; a failed __init__ left nothing to close.
        replica = getattr(self, "_replica", None)
        if replica is not None:
            replica.close()


def _warm_up(opened: ReplicaStore, layout: KvLayout, settings: Settings, clock: Clock) -> None:
    """Take what the service used last from disks into RAM, as far as the settings' time allows.

    A replica that is added under load then has what most requests want, and says so to routers.
    """
    limits = WarmUpLimits(int(_WARM_SHARE * settings.ram_budget_bytes), settings.warm_up_s)
    if limits.longest_s > 0:
        keys = opened.hottest(limits.budget_bytes)
        loaded = warm_up(opened.store, keys, layout, limits, clock)
        log.info("warmed up with %d bytes of KV, of %d records", loaded, len(keys))
