"""One replica: a model, its store and its engine. What a Worker actor holds, without Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.clock import Clock
from rakv_cluster.config import Settings
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.engine.text import TokenBytes
from rakv_cluster.errors import ConfigError, Unavailable, UnsupportedModel
from rakv_cluster.logs import REQUEST_ID, fields
from rakv_cluster.model.card import ModelCard
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.four_bit import four_bit_runner
from rakv_cluster.model.grammar import TokenizerGrammars
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.model.selection import KernelOptions
from rakv_cluster.model.step import Runner
from rakv_cluster.model.threads import aside
from rakv_cluster.reuse.blender import BlendSupport
from rakv_cluster.reuse.calibration import calibration_path
from rakv_cluster.reuse.flights import FlightLimits
from rakv_cluster.reuse.probing import probe_settings
from rakv_cluster.routing.autoscaling import ReplicaLoad
from rakv_cluster.routing.report import ReplicaReport
from rakv_cluster.serving.bridge import EventBridge
from rakv_cluster.serving.calibrator import Calibrator, idle_measurement
from rakv_cluster.serving.figures import replica_figures
from rakv_cluster.serving.routing_report import RoutingReporter
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_files import (
    CostIdentity,
    costs_path,
    machine_name,
    save_costs,
)
from rakv_cluster.speculation.draft_model import UNKNOWN_AGREEMENT, DraftModel, check_vocabulary
from rakv_cluster.speculation.draft_rounds import ModelDrafter
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.speculation.self_benchmark import seeded_costs
from rakv_cluster.speculation.self_draft import SelfDraft
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import NO_FLIGHT, SingleFlight
from rakv_cluster.telemetry import Figures
from rakv_cluster.types import FinishReason, ReuseMode

log = logging.getLogger(__name__)

_REPORTED_CONTEXT_TOKENS = 512


def _no_keys(count: int) -> Sequence[bytes]:
    return ()


class Replica:
    """A :class:`~rakv_cluster.serving.backend.Backend` in this process, of one replica: ``name``.

    ``newest_keys`` names the keys in RAM, used last first: what routers are told is here.
    ``draft`` is a model that drafts for ``model`` and is expected to agree with it in a share of
    ``draft_agreement``; raises :class:`ConfigError` if their vocabularies differ.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: ChunkStore,
        settings: Settings,
        clock: Clock,
        *,
        flight: SingleFlight = NO_FLIGHT,
        newest_keys: Callable[[int], Sequence[bytes]] = _no_keys,
        draft: LoadedModel | None = None,
        draft_agreement: float = UNKNOWN_AGREEMENT,
        name: str = "local",
    ) -> None:
        self._name = name
        self._card = model.card
        self._refused_kernels = model.refused_kernels
        self._store = store
        self._costs = _identity(model)
        self._costs_path = costs_path(settings.cache_path, self._costs)
        self._speculator = aside(
            lambda: _speculator(model, draft, draft_agreement, settings, clock)
        )
        calibrator = Calibrator(
            calibration_path(settings.cache_path, model.card.digest),
            idle_measurement(model, lambda: self._engine.idle_runner, settings.calibration_prompts),
            prompts=settings.calibration_prompts,
        )
        tokenizer_json = model.tokenizer.backend_tokenizer.to_str()
        self._grammars = TokenizerGrammars(
            tokenizer_json, model.runner.vocab_size, model.card.eos_token_ids
        )
        # One thread: many hostile schemas take one core from the engine, not all.
        self._compiler = ThreadPoolExecutor(1, "rakv-grammar")
        self._engine = Engine(
            model.runner,
            store,
            self._speculator,
            cuts=CutTable.from_tokenizer(model.tokenizer),
            limits=ChunkLimits(settings.chunk_min_tokens, settings.chunk_max_tokens),
            settings=engine_settings(settings),
            clock=clock,
            numeric_class=model.card.numeric_class,
            near_tie_eps=model.card.guarded_eps,
            flight=flight,
            blending=_blending(model, settings, calibrator),
            grammars=self._grammars,
            token_bytes=TokenBytes.from_json(tokenizer_json),
        )
        self._reporter = RoutingReporter(
            self._engine,
            slots=settings.max_running,
            token_bytes=model.runner.layout.bytes_per_token,
            newest_keys=newest_keys,
            price_loads=settings.price_loads,
            clock=clock,
        )
        self._engine.start()

    async def describe(self) -> ModelCard:
        """Identity and limits of the model; raises :class:`Unavailable` if the engine broke."""
        self.check()
        return self._card

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Events of one request; closing the generator cancels it within one step."""
        REQUEST_ID.set(request.trace_id)
        if request.grammar and not self._grammars.knows(request.grammar):
            # Not in this thread, which writes all streams; the engine finds it compiled.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiler, self._grammars, request.grammar)
        bridge = EventBridge(asyncio.get_running_loop(), partial(self._ended, request))
        self._engine.submit(request, bridge)
        try:
            async with aclosing(bridge.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._engine.cancel(request.request_id)

    def routing_report(self) -> ReplicaReport:
        """What routers are told."""
        return self._reporter.report()

    def load(self) -> ReplicaLoad:
        """What scaling is told."""
        return self._reporter.load()

    async def stats(self) -> dict[str, Figures]:
        """Its figures (:data:`~rakv_cluster.serving.figures.FIGURES`) under its name."""
        figures = replica_figures(
            self._engine.stats(),
            # Asks the node's shard, which may be slow: streams must not wait for it.
            await asyncio.to_thread(self._store.stats),
            self._reporter.report(),
            self._speculator.report(context_tokens=_REPORTED_CONTEXT_TOKENS),
            self._refused_kernels,
        )
        return {self._name: figures}

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Remove KV from RAM, and what of it was on its way to the disk from there."""
        await asyncio.to_thread(self._forget, keys)

    def check(self) -> None:
        """Raise :class:`Unavailable` unless the engine works."""
        if not self._engine.healthy():
            raise Unavailable("the engine does not run", retry_after_s=1.0)

    def close(self) -> None:
        """Cancel what runs, finish pending writes, close the store."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._engine.stop()
        self._keep_costs()
        self._store.close()

    def _ended(self, request: EngineRequest, event: EngineEvent) -> None:
        """Learn from a request that has ended, or that its client has left: what it took of the
        replica until then it did take."""
        REQUEST_ID.set(request.trace_id)
        if event.finish is not None and event.stats is not None:
            if not request.background:  # that gave way to others, and does again
                self._reporter.ended(request, event.stats)
            _log_end(request, event.finish, event.stats)

    def _forget(self, keys: Sequence[bytes]) -> None:
        self._engine.settle(keys)
        self._store.delete(keys)

    def _keep_costs(self) -> None:
        """What was learned of step costs serves the first request after the next start."""
        try:
            save_costs(self._costs_path, self._costs, self._speculator.table)
        except OSError:
            log.warning("step costs cannot be kept in %s", self._costs_path, exc_info=True)


def _log_end(request: EngineRequest, finish: FinishReason, stats: RequestStats) -> None:
    log.info(
        "generated",
        extra=fields(
            id=request.request_id,
            tenant=request.tenant,
            finish=finish.value,
            ram_tokens=stats.ram_tokens,
            disk_tokens=stats.disk_tokens,
            computed_tokens=stats.computed_tokens,
            output_tokens=stats.output_tokens,
        ),
    )


def load_served_model(source: str, settings: Settings) -> LoadedModel:
    """The model as the service's settings want it; raises what ``load_model`` raises.

    Loaded aside: the engine's thread is the one that computes from then on.
    """
    return aside(
        lambda: load_model(
            resolve(source, settings.cache_path),
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads_per_replica,
            kernels=KernelOptions(
                fused=settings.fused,
                native=settings.native,
                numerics=settings.numerics,
                packed_budget_bytes=settings.packed_budget_bytes,
                cuda_graphs=settings.cuda_graphs,
            ),
        )
    )


def engine_settings(settings: Settings) -> EngineSettings:
    """The service's settings in the engine's terms."""
    return EngineSettings(
        kv_budget_bytes=int(settings.kv_budget_bytes),
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_step_tokens=settings.step_token_budget,
        price_loads=settings.price_loads,
        share_across_classes=settings.share_across_classes,
        flight=FlightLimits(
            min_compute_ms=settings.single_flight_min_ms, longest_s=settings.single_flight_wait_s
        ),
    )


def _blending(model: LoadedModel, settings: Settings, calibrator: Calibrator) -> BlendSupport:
    """Raises :class:`ConfigError` if blending is the default and this model cannot."""
    if settings.default_reuse is ReuseMode.BLEND and model.rotation.refusal:
        raise ConfigError(
            f"this model cannot blend: {model.rotation.refusal}", field="default_reuse"
        )
    probe = probe_settings(model.card.layout.layers)
    return BlendSupport(model.rotation, calibrator.current, probe=probe)


def _identity(model: LoadedModel) -> CostIdentity:
    return CostIdentity(machine_name(), model.card.digest.hex(), model.card.numeric_class)


def _speculator(
    model: LoadedModel,
    draft: LoadedModel | None,
    agreement: float,
    settings: Settings,
    clock: Clock,
) -> Speculator:
    """With this machine's step costs, measured if they are not known yet (some seconds)."""
    table = seeded_costs(model.runner, _identity(model), cache_dir=settings.cache_path, clock=clock)
    governor = GovernorSettings(GovernorMode(settings.speculation_governor))
    controller = ControllerSettings(governor=governor)
    drafter = _drafter(model, draft, agreement, settings, clock)
    return Speculator(table, controller, clock, draft_model=drafter)


def _drafter(
    model: LoadedModel,
    draft: LoadedModel | None,
    agreement: float,
    settings: Settings,
    clock: Clock,
) -> ModelDrafter | None:
    """What drafts where a text offers nothing, its costs measured; None: nothing does."""
    drafter: DraftModel | SelfDraft
    if draft is not None:
        check_vocabulary(model.tokenizer, draft.tokenizer)
        drafter = DraftModel(
            draft.runner,
            clock,
            kv_budget_bytes=int(settings.draft_kv_budget_bytes),
            vocab_size=model.runner.vocab_size,
            agreement=agreement,
        )
    elif settings.self_draft:
        drafter = SelfDraft(_four_bits(model), clock)
    else:
        return None
    drafter.calibrate()
    return drafter


def _four_bits(model: LoadedModel) -> Runner:
    try:
        return four_bit_runner(model.runner)
    except UnsupportedModel as error:
        raise ConfigError(
            f"this model cannot draft for itself: {error}", field="self_draft"
        ) from error
