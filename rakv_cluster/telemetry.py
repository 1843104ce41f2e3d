"""What a service counts, and how Prometheus reads it.

An ingress counts on a registry of its own. What replicas report is shown as they report it: every
figure of every replica that answered, under its ``replica`` label. Label values come from closed
sets (endpoint, status class, source), so the number of series is bounded whatever clients send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WARM_SHARE = 0.5
"""From this share of the prompt on whose KV was reused, a request counts as warm."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "rakv_"
_COUNTED = "_total"

Figures = Mapping[str, "float | Mapping[str, float]"]
"""What a replica reports, by name; a value for each value of a label where the figure has one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a replica; ``label`` tells its values apart where it has several.

    Names are Prometheus', without our prefix: base units, ``_total`` where it only grows.
    """

    name: str
    help: str
    label: str = ""

    @property
    def metric(self) -> str:
        """Its name on ``/metrics``."""
        return _PREFIX + self.name

    @property
    def kind(self) -> str:
        """``counter`` or ``gauge``."""
        return "counter" if self.name.endswith(_COUNTED) else "gauge"


class ReplicaFigures(Collector):
    """Figures of the replicas that answered the last time they were asked."""

    def __init__(self) -> None:
        self._known: Sequence[Figure] = ()
        self._by_replica: Mapping[str, Figures] = {}

    def update(self, known: Sequence[Figure], by_replica: Mapping[str, Figures]) -> None:
        """Show these from now on; a replica that is not among them is no longer shown."""
        self._known = known
        self._by_replica = by_replica

    def collect(self) -> Iterable[Metric]:
        """One family a figure, in the order of the table."""
        yield GaugeMetricFamily(
            f"{_PREFIX}replicas", "Replicas that answered this scrape.", len(self._by_replica)
        )
        for figure in self._known:
            labels = ["replica", figure.label] if figure.label else ["replica"]
            family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            metric = family(figure.metric, figure.help, labels=labels)
            for replica, figures in self._by_replica.items():
                for values, number in _values(figures.get(figure.name, {})):
                    metric.add_metric([replica, *values], number)
            yield metric


class ServiceMetrics:
    """What an ingress counts; ``ingress`` names it where there are several.

    A scrape through Serve's proxy reaches any one of them, so each says which it is.
    """

    def __init__(self, ingress: str = "") -> None:
        own = CollectorRegistry()
        self._own = _Own(own, {"ingress": ingress} if ingress else {})
        self.replicas = ReplicaFigures()
        self.registry = CollectorRegistry()
        self.registry.register(self._own)
        self.registry.register(self.replicas)
        self.requests = Counter(
            "rakv_requests", "Finished requests.", ("endpoint", "status"), registry=own
        )
        self.in_flight = Gauge("rakv_requests_in_flight", "Requests being answered.", registry=own)
        self.ttft_s = Histogram(
            "rakv_time_to_first_token_seconds",
            "From the request's arrival at the ingress to its first token; warm: at least half of "
            "the prompt's KV was reused.",
            ("cache",),
            buckets=_SECONDS,
            registry=own,
        )
        self.prompt_tokens = Counter(
            "rakv_prompt_tokens",
            "Prompt tokens by what the request allowed to reuse and where their KV came from: ram, "
            "disk, blended (moved from another place, approximate) or computed.",
            ("reuse", "source"),
            registry=own,
        )
        self.output_tokens = Counter("rakv_output_tokens", "Tokens generated.", registry=own)
        self.retries = Counter(
            "rakv_replica_retries",
            "Requests continued on another replica after theirs died or had no memory left.",
            registry=own,
        )
        self.hedged = Counter(
            "rakv_hedged_requests",
            "Requests sent to a second replica because their first token was late, by whose "
            "answer was read: first or second.",
            ("answer",),
            registry=own,
        )
        self.audits = Counter(
            "rakv_blend_audits",
            "Blended answers compared with full recompute: done or failed.",
            ("outcome",),
            registry=own,
        )
        self.audited_kl = Gauge(
            "rakv_blend_audited_kl",
            "95th percentile of the divergence of audited first tokens, in nats, of the budget "
            "audited last.",
            registry=own,
        )
        self.routed = Counter(
            "rakv_routed_requests",
            "Requests by why their replica was chosen; score_failed and score_late are requests "
            "routed without the score.",
            ("reason",),
            registry=own,
        )
        self.unreachable = Gauge(
            "rakv_replicas_unreachable",
            "Replicas that did not answer in time when the figures of all were last asked for.",
            registry=own,
        )

    def families(self) -> list[Metric]:
        """What the ingress itself counts."""
        return list(self._own.collect())

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _Own(Collector):
    """A registry's metrics with more labels on each sample, and without the times at which series
    began, which nobody asks for."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


def _values(value: float | Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Label values and number of each of a figure's values."""
    if isinstance(value, Mapping):
        for label, number in value.items():
            yield (label,), number
    else:
        yield (), value
