"""One prepared request on its way through the service, whatever surface it came by."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rakv_cluster.errors import InvalidRequest, Overloaded, RakvError, Unavailable
from rakv_cluster.logs import fields
from rakv_cluster.serving.auth import Caller
from rakv_cluster.serving.generation import Update
from rakv_cluster.serving.openai_format import Totals
from rakv_cluster.serving.recent import RequestLine
from rakv_cluster.serving.service import Prepared, Service
from rakv_cluster.telemetry import WARM_SHARE, ServiceMetrics

log = logging.getLogger("rakv.requests")

_REFUSALS = (InvalidRequest, Overloaded, Unavailable)


class Run:
    """Updates of a request, counted in the metrics and booked on the caller's account.

    ``endpoint`` labels it in the metrics; ``started_s`` is when it arrived, on the service's clock.
    ``traceparent`` is the caller's trace, if any.
    """

    def __init__(
        self,
        service: Service,
        metrics: ServiceMetrics,
        prepared: Prepared,
        caller: Caller,
        *,
        endpoint: str,
        started_s: float,
        traceparent: str = "",
    ) -> None:
        self.prepared = prepared
        self.totals = Totals(
            prepared.prompt_tokens,
            prepared.reuse,
            prepared.tokenize_ms,
            service.card.exactness,
            prepared.placed,
        )
        self._service = service
        self._metrics = metrics
        self._caller = caller
        self._endpoint = endpoint
        self._started_s = started_s
        self._traceparent = traceparent

    def elapsed_ms(self) -> float:
        """Since the request arrived."""
        return (self._service.clock.monotonic_s() - self._started_s) * 1e3

    async def updates(self) -> AsyncGenerator[Update, None]:
        """See :meth:`Service.run`; to be used once."""
        status, refused = "cancelled", False
        totals = self.totals
        self._metrics.in_flight.inc()
        try:
            async with aclosing(self._service.run(self.prepared)) as updates:
                async for update in updates:
                    first = not totals.output_tokens
                    totals.add(update, self.elapsed_ms())
                    if first:
                        cache = "warm" if self._warm() else "cold"
                        self._metrics.ttft_s.labels(cache).observe(totals.ttft_ms / 1e3)
                    yield update
            status = "ok"
        except Exception as error:
            status = error.code if isinstance(error, RakvError) else RakvError.code
            refused = isinstance(error, _REFUSALS) and not totals.output_tokens
            raise
        finally:
            self._metrics.in_flight.dec()
            self._account(status, refused=refused)

    def _account(self, status: str, *, refused: bool) -> None:
        """Count the request, which has ended so; book it, unless it was refused before it ran;
        note it among the recent ones."""
        totals, stats = self.totals, self.totals.stats
        output_tokens = sum(totals.output_tokens.values())
        self._metrics.requests.labels(self._endpoint, status).inc()
        if not refused:
            self._service.gate.charge_tokens(self._caller, totals.prompt_tokens + output_tokens)
        self._metrics.output_tokens.inc(output_tokens)
        for source, count in totals.sources().items():
            self._metrics.prompt_tokens.labels(totals.reuse.value, source).inc(count)
        self._log(status, output_tokens)
        line = RequestLine(
            id=self.prepared.id,
            at_s=self._service.clock.wall_s(),
            endpoint=self._endpoint,
            status=status,
            reuse=totals.reuse.value,
            plan=totals.sources(),
            output_tokens=output_tokens,
            steps_by_drafts=stats.steps_by_drafts,
            accepted_tokens=stats.accepted_tokens,
            ttft_ms=totals.ttft_ms,
            total_ms=self.elapsed_ms(),
            warm=self._warm(),
        )
        self._service.recent.add(line)
        self._service.tracer.ended(line, stats, self._traceparent)

    def _warm(self) -> bool:
        """Whether most of the prompt was reused, as far as is known."""
        return self.totals.stats.cached_tokens >= WARM_SHARE * max(self.totals.prompt_tokens, 1)

    def _log(self, status: str, output_tokens: int) -> None:
        totals = self.totals
        log.info(
            "request",
            extra=fields(
                id=self.prepared.id,
                tenant=self._caller.tenant,
                endpoint=self._endpoint,
                status=status,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.stats.cached_tokens,
                output_tokens=output_tokens,
                ttft_ms=round(totals.ttft_ms, 2),
                total_ms=round(self.elapsed_ms(), 2),
            ),
        )
