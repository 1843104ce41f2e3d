"""Putting together the parts of an engine that find, load and store KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rakv_cluster.clock import Clock
from rakv_cluster.engine.keeping import Keeper
from rakv_cluster.engine.prefixes import Prefixes
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.engine.stats import Counters
from rakv_cluster.kv.buffer import BufferPool
from rakv_cluster.kv.transfer import Transfer, transfer_for
from rakv_cluster.model.step import Runner
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.costs import Costs
from rakv_cluster.reuse.saver import Saver
from rakv_cluster.reuse.workers import Workers
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import SingleFlight


@dataclass(slots=True)
class Reuse:
    """What those parts have in common."""

    store: ChunkStore
    flight: SingleFlight
    blending: BlendSupport
    runner: Runner
    pool: BufferPool
    costs: Costs
    settings: EngineSettings
    clock: Clock
    numeric_class: str
    transfer: Transfer = field(init=False)

    def __post_init__(self) -> None:
        self.transfer = transfer_for(self.runner.device)

    def saver(self, workers: Workers) -> Saver:
        """Writes on ``workers``."""
        return Saver(
            self.store,
            self.runner.layout,
            workers,
            self.transfer,
            self.clock,
            numeric_class=self.numeric_class,
            queue_bytes=self.settings.save_queue_bytes,
            settle_s=self.settings.settle_s,
            learns=not self.blending.rotation.refusal,
        )

    def prefixes(
        self,
        saver: Saver,
        keeper: Keeper,
        loaders: Workers,
        counters: Counters,
        wake: Callable[[], None],
    ) -> Prefixes:
        """Loads on ``loaders``, which ``wake`` the engine when they are done."""
        return Prefixes(
            store=self.store,
            flight=self.flight,
            pool=self.pool,
            layout=self.runner.layout,
            transfer=self.transfer,
            costs=self.costs,
            saver=saver,
            keeper=keeper,
            loaders=loaders,
            settings=self.settings,
            numeric_class=self.numeric_class,
            clock=self.clock,
            counters=counters,
            wake=wake,
            blending=self.blending,
        )
