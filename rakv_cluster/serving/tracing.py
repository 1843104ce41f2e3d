"""Traces of requests, by OpenTelemetry where `otlp_endpoint` is set (the `otel` extra).

A request's spans are made when it has ended, from the times that are measured anyway, so that
tracing costs the request nothing while it runs. A client's ``traceparent`` becomes their parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from rakv_cluster.engine.request import RequestStats
from rakv_cluster.errors import ConfigError
from rakv_cluster.serving.recent import RequestLine

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_EXPORT_TIMEOUT_S = 3
"""Of one batch; also about what a stop waits for a collector that is gone."""
_PHASES = ("queue", "load", "prefill", "decode")


class Tracer(Protocol):
    """Where ended requests are told."""

    def ended(self, line: RequestLine, stats: RequestStats, traceparent: str) -> None:
        """One did; ``traceparent`` is its caller's (W3C Trace Context), or empty."""
        ...

    def close(self) -> None:
        """Send what has not been sent."""
        ...


class NoTraces:
    """A tracer that keeps nothing."""

    def ended(self, line: RequestLine, stats: RequestStats, traceparent: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to send."""


NO_TRACES = NoTraces()


class OtelTracer:
    """Hands a span per request, and one below it per phase, to ``processor``."""

    def __init__(self, processor: SpanProcessor, service_name: str) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  # an extra

        # Of its own: the process's global provider is the application's to set.
        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rakv_cluster")

    def ended(self, line: RequestLine, stats: RequestStats, traceparent: str) -> None:
        """Spans on the wall clock, the phases one after the other up to the request's end."""
        from opentelemetry import trace  # noqa: PLC0415  # an extra
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415  # an extra

        propagator = tracecontext.TraceContextTextMapPropagator()
        parent = propagator.extract({"traceparent": traceparent} if traceparent else {})
        end_ns = _ns(line.at_s)
        root = self._tracer.start_span(
            "rakv.request",
            context=parent,
            start_time=_ns(line.at_s - line.total_ms / 1e3),
            attributes=_attributes(line),
        )
        if line.status != "ok":
            root.set_status(trace.StatusCode.ERROR, line.status)
        inside = trace.set_span_in_context(root)
        for name, start_ns, stop_ns in _phases(stats, end_ns):
            span = self._tracer.start_span(f"rakv.{name}", context=inside, start_time=start_ns)
            span.end(stop_ns)
        root.end(end_ns)

    def close(self) -> None:
        """Flush and stop the processor; bounded by its own timeout."""
        self._provider.shutdown()


def open_tracer(endpoint: str, service_name: str) -> Tracer:
    """A tracer that sends to an OTLP/HTTP endpoint, such as ``http://collector:4318/v1/traces``.

    Empty: one that keeps nothing. Raises :class:`ConfigError` without the packages.
    """
    if not endpoint:
        return NO_TRACES
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415  # an extra
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs the otel extra (pip install 'rakv-cluster[otel]'): {error}",
            field="otlp_endpoint",
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    return OtelTracer(BatchSpanProcessor(exporter), service_name)


def _attributes(line: RequestLine) -> Mapping[str, str | int | float]:
    plan = {f"rakv.prompt_tokens.{source}": count for source, count in line.plan.items()}
    return {
        "rakv.request_id": line.id,
        "rakv.endpoint": line.endpoint,
        "rakv.status": line.status,
        "rakv.reuse": line.reuse,
        "rakv.output_tokens": line.output_tokens,
        "rakv.accepted_tokens": line.accepted_tokens,
        "rakv.ttft_ms": line.ttft_ms,
        **plan,
    }


def _phases(stats: RequestStats, end_ns: int) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each phase that took time; the last ends when the request does."""
    lengths = {name: _ns(getattr(stats, f"{name}_ms") / 1e3) for name in _PHASES}
    at_ns = end_ns - sum(lengths.values())
    for name, length in lengths.items():
        if length:
            yield name, at_ns, at_ns + length
        at_ns += length


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
