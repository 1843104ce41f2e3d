"""Counters and histograms of one process, on a registry of its own.

Label values come from closed sets (endpoint, status class, source), so the number of series is
bounded whatever clients send.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServiceMetrics:
    """What an ingress counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rakv_requests", "Finished requests.", ("endpoint", "status"), registry=self.registry
        )
        self.in_flight = Gauge(
            "rakv_requests_in_flight", "Requests being answered.", registry=self.registry
        )
        self.ttft_s = Histogram(
            "rakv_time_to_first_token_seconds",
            "From the request's arrival at the ingress to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "rakv_prompt_tokens",
            "Prompt tokens by where their KV came from: ram, disk or computed.",
            ("source",),
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "rakv_output_tokens", "Tokens generated.", registry=self.registry
        )
        self.retries = Counter(
            "rakv_replica_retries",
            "Requests continued on another replica after theirs died.",
            registry=self.registry,
        )
        self.routed = Counter(
            "rakv_routed_requests",
            "Requests by why their replica was chosen; score_failed and score_late are requests "
            "routed without the score.",
            ("reason",),
            registry=self.registry,
        )
        self.replica = Gauge(
            "rakv_replica",
            "Figures of the replica that answered the scrape, by name.",
            ("name",),
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)
