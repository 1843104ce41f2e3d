"""The figures of a replica: what each is called, what it means, and how it is come by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from rakv_cluster.engine.stats import Counters, EngineStats
from rakv_cluster.routing.report import ReplicaReport
from rakv_cluster.speculation.report import ReplicaReport as SpeculationReport
from rakv_cluster.speculation.report import figures
from rakv_cluster.store.base import StoreStats
from rakv_cluster.telemetry import Figure, Figures

_ENGINE_COUNTERS = tuple(field.name for field in fields(Counters) if field.name != "finished")
_COUNTER_HELP: Mapping[str, str] = {
    "steps": "Forward passes.",
    "requests": "Requests taken in.",
    "preemptions": "Requests that gave their KV memory to older ones and were begun again.",
    "growths": "Requests whose KV buffer was enlarged while they ran.",
    "computed_tokens": "Prompt tokens whose KV was computed.",
    "output_tokens": "Tokens generated.",
    "ram_tokens": "Prompt tokens whose KV was copied from RAM.",
    "blended_tokens": "Prompt tokens whose KV was moved from another place (blend).",
    "disk_tokens": "Prompt tokens whose KV was read from a disk, this node's or another's.",
    "shared_tokens": "The part of ram_tokens that came from another running request's buffer.",
    "load_failures": "Loads that brought less than was found; the rest was computed.",
    "load_timeouts": "Loads that were given up; the rest was computed.",
    "join_timeouts": "Waits for another request's prefill that were given up.",
    "flights_awaited": "Requests that waited for another replica's prefill of the same content.",
    "flight_timeouts": "Such waits that were given up.",
    "step_failures": "Forward passes that raised.",
    "replays": "Near-ties that were decided again.",
    "replay_steps": "One-token steps that decided a near-tie.",
    "replay_ms": "Time of those steps.",
    "sink_failures": "Answers that could not be delivered.",
}


def _counter(name: str) -> str:
    """What an engine's counter is called here."""
    return f"engine_{name.removesuffix('_ms')}{'_seconds' * name.endswith('_ms')}_total"


FIGURES: tuple[Figure, ...] = (
    Figure("engine_running", "Requests that are worked on."),
    Figure("engine_waiting", "Requests that wait for a slot or memory."),
    Figure("engine_kv_leased_bytes", "KV memory of running requests."),
    Figure("engine_kv_budget_bytes", "KV memory that running requests may use."),
    Figure("engine_prefill_seconds_per_token", "Measured time to compute a prompt token."),
    Figure("engine_decode_seconds_per_token", "Measured time of a plain decode step, alone."),
    Figure("engine_load_seconds_per_byte", "Measured time to load stored KV.", "tier"),
    Figure("engine_saved_records_total", "KV records handed to the store."),
    Figure("engine_dropped_records_total", "KV records not kept, since too many waited."),
    Figure("engine_finished_total", "Ended requests by how they ended.", "reason"),
    *(
        Figure(_counter(name), _COUNTER_HELP.get(name, f"The engine's counter {name}."))
        for name in _ENGINE_COUNTERS
    ),
    Figure(
        "model_refused_kernels_total",
        "Kernels that could not be made or failed the check at load, so that others serve.",
        "kernels",
    ),
    Figure("replica_backlog_seconds", "Expected time to compute the prompts that are there."),
    Figure("replica_seconds_per_output_token", "Expected pace of one request, drafts included."),
    Figure("store_records", "Records on this node's disk, or in RAM where there is no disk."),
    Figure("store_bytes", "Their size."),
    Figure("store_budget_bytes", "The size they may have."),
    Figure(
        "store_events_total",
        "What happened in the replica's stores; `failed_writes`: records that the disk raised on.",
        "event",
    ),
    Figure("speculation_steps_total", "Decode steps of a sequence by its drafts.", "drafts"),
    Figure("speculation_decisions_total", "Decode steps by why so many drafts.", "reason"),
    Figure("speculation_acceptance_ratio", "Share of drafts accepted, by place.", "position"),
    Figure("speculation_cost_ratio", "Time of a step with drafts over one without.", "drafts"),
    Figure("speculation_break_even_acceptance_ratio", "Acceptance that pays for it.", "drafts"),
    Figure("speculation_tokens_per_step", "Tokens a step would have brought.", "drafts"),
    Figure("speculation_plain_step_seconds", "Measured time of a step without drafts."),
    Figure("speculation_draft_seconds_total", "Time spent on making drafts."),
    Figure("speculation_requests_total", "Requests that were judged in hindsight."),
    Figure("speculation_right_decisions_ratio", "Share of them as fast as the best fixed number."),
    Figure("speculation_best_fixed_drafts", "The fixed number that would have been best."),
    Figure("speculation_overspend_ratio", "Time lost to drafts over plain time; < 0: saved."),
    Figure("speculation_regret_ratio", "Share of the best fixed number's pace that was missed."),
)
"""Every figure, in the order of docs/metrics.md (which scripts/metrics writes)."""


def replica_figures(
    engine: EngineStats,
    store: StoreStats,
    routing: ReplicaReport,
    speculation: SpeculationReport,
    refused_kernels: Sequence[str],
) -> Figures:
    """A replica's reports under the names of :data:`FIGURES`, in base units."""
    counters = engine.counters
    return {
        "engine_running": engine.running,
        "engine_waiting": engine.waiting,
        "engine_kv_leased_bytes": engine.kv_leased_bytes,
        "engine_kv_budget_bytes": engine.kv_budget_bytes,
        "engine_prefill_seconds_per_token": engine.prefill_ms_per_token / 1e3,
        "engine_decode_seconds_per_token": engine.decode_ms_per_token / 1e3,
        "engine_load_seconds_per_byte": {
            "ram": engine.ram_load_ms_per_mb / 1e9,
            "disk": engine.disk_load_ms_per_mb / 1e9,
        },
        "engine_saved_records_total": engine.saved_records,
        "engine_dropped_records_total": engine.dropped_records,
        "engine_finished_total": dict(counters.finished),
        **{
            _counter(name): getattr(counters, name) / (1e3 if name.endswith("_ms") else 1)
            for name in _ENGINE_COUNTERS
        },
        "model_refused_kernels_total": dict.fromkeys(refused_kernels, 1),
        "replica_backlog_seconds": routing.backlog_ms / 1e3,
        "replica_seconds_per_output_token": routing.token_ms / 1e3,
        "store_records": store.records,
        "store_bytes": store.stored_bytes,
        "store_budget_bytes": store.budget_bytes,
        "store_events_total": dict(store.counters),
        **{f"speculation_{name}": value for name, value in figures(speculation).items()},
    }
