"""Bounds and targets of one engine; the service's settings are translated into this."""

from __future__ import annotations

from dataclasses import dataclass, field

from rakv_cluster.errors import ConfigError
from rakv_cluster.reuse.flights import FlightLimits


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Every limit of the engine. Raises ``ConfigError`` naming the field for a useless value.

    ``max_step_tokens`` bounds the rows of one forward, hence how long a cancellation can take.
    ``decode_gap_factor``: while prompts are being computed beside running streams, a step should
    take at most this many times what the streams' step takes alone. KV memory is leased in
    multiples of ``kv_granule_tokens``, and ``growth_tokens`` ahead of a request's output.
    ``join_s`` bounds the wait for another request that computes the same prefix, ``settle_s``
    the wait for a write under way. ``price_loads`` false loads whatever is found, even where
    computing is expected to be faster (to measure what pricing is worth). After
    ``failure_limit`` steps in a row without one successful forward the engine is unhealthy.
    ``flight`` bounds the wait for another replica that computes the same prefix.
    A request in the background has steps, of ``background_step_tokens``, while no other could use
    them; so long as it may delay others. After ``background_s`` it is one like others.
    """

    kv_budget_bytes: int = 2 << 30
    kv_granule_tokens: int = 256
    max_running: int = 16
    max_waiting: int = 256
    max_step_tokens: int = 512
    min_prefill_tokens: int = 8
    decode_gap_factor: float = 2.5
    growth_tokens: int = 256
    loader_threads: int = 2
    load_deadline_s: float = 5.0
    join_s: float = 30.0
    settle_s: float = 0.5
    save_queue_bytes: int = 256 << 20
    share_across_classes: bool = False
    price_loads: bool = True
    failure_limit: int = 3
    background_step_tokens: int = 32
    background_s: float = 60.0
    flight: FlightLimits = field(default_factory=FlightLimits)

    def __post_init__(self) -> None:
        for name in (
            "kv_budget_bytes",
            "kv_granule_tokens",
            "max_running",
            "max_waiting",
            "max_step_tokens",
            "min_prefill_tokens",
            "growth_tokens",
            "loader_threads",
            "failure_limit",
            "background_step_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        for name in ("load_deadline_s", "join_s", "settle_s", "save_queue_bytes", "background_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative", field=name)
        if self.decode_gap_factor < 1:
            raise ConfigError("decode_gap_factor must be at least 1", field="decode_gap_factor")
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                "max_step_tokens must hold one token of each of max_running sequences",
                field="max_step_tokens",
            )
