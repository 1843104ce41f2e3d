"""What an engine reports about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since start; written by the engine thread only.

    ``replays`` are near-ties that were decided again (see :mod:`.near_ties`), in ``replay_steps``
    lone steps.
    """

    steps: int = 0
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    growths: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    blended_tokens: int = 0
    shared_tokens: int = 0
    load_failures: int = 0
    load_timeouts: int = 0
    join_timeouts: int = 0
    flights_awaited: int = 0
    flight_timeouts: int = 0
    step_failures: int = 0
    replays: int = 0
    replay_steps: int = 0
    replay_ms: float = 0.0
    sink_failures: int = 0

    def finish(self, reason: str) -> None:
        """Count an ended request."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sizes now and totals since start.

    ``shared_tokens`` is the part of ``ram_tokens`` that was copied from another request's buffer
    in this replica. ``prefill_ms_per_token`` is for full steps near position 0.
    """

    running: int
    waiting: int
    kv_leased_bytes: int
    kv_budget_bytes: int
    prefill_ms_per_token: float
    decode_ms_per_token: float
    ram_load_ms_per_mb: float
    disk_load_ms_per_mb: float
    saved_records: int
    dropped_records: int
    counters: Counters
