"""Blended answers checked against full recompute, off the critical path, and blending shut off.

The first blended requests of each budget are audited, then one in a hundred: once such a request
has ended, its prompt is computed exactly, in the background, and the two distributions of its first
token compared.
Where the audited divergence exceeds what the budget allows, later requests of that budget are
computed exactly and say so. An audit's exact run also stores the prompt's KV and teaches which of
its tokens are sensitive.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.errors import RakvError
from rakv_cluster.model.card import ModelCard
from rakv_cluster.serving.backend import Backend
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.types import ReuseMode, TokenLogprob

log = logging.getLogger(__name__)

COMPARED_TOKENS = 20
_MOST_BUDGETS = 64
_TIMEOUT_S = 600.0
"""Longer than what gives way to others has to wait, whatever time its request had."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The first ``first`` blended requests of a budget are audited, then each ``every``-th.

    A budget is shut once at least ``fewest`` of its last ``window`` audits are known and their
    95th percentile exceeds it.
    """

    first: int = 60
    every: int = 100
    window: int = 60
    fewest: int = 20


@dataclass(slots=True)
class _Budget:
    """What is known of the requests that asked for one ``max_kl``."""

    window: int
    blended: int = 0
    divergences: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.divergences = deque(maxlen=self.window)

    @property
    def p95(self) -> float:
        """95th percentile of the audits in the window."""
        return float(np.percentile(list(self.divergences), 95)) if self.divergences else 0.0


class Audits:
    """Which requests are audited, and which budgets are shut. Used by one event loop."""

    def __init__(self, settings: AuditSettings) -> None:
        self._settings = settings
        self._budgets: dict[float, _Budget] = {}

    def wants(self, max_kl: float) -> bool:
        """Count one more blended request of this budget; whether it is to be audited."""
        if max_kl not in self._budgets and len(self._budgets) >= _MOST_BUDGETS:
            return False
        budget = self._budgets.setdefault(max_kl, _Budget(self._settings.window))
        budget.blended += 1
        early = budget.blended <= self._settings.first
        return early or budget.blended % self._settings.every == 0

    def note(self, max_kl: float, divergence: float) -> float:
        """Take an audit's result; the budget's 95th percentile now."""
        budget = self._budgets.setdefault(max_kl, _Budget(self._settings.window))
        budget.divergences.append(divergence)
        return budget.p95

    def refusal(self, max_kl: float) -> str:
        """Why requests of this budget are not blended any more; empty while they are."""
        budget = self._budgets.get(max_kl)
        if budget is None or len(budget.divergences) < self._settings.fewest:
            return ""
        if budget.p95 <= max_kl:
            return ""
        return (
            f"shut off: {len(budget.divergences)} audited answers differ from full recompute by "
            f"{budget.p95:.3g} nats (95th percentile), more than max_kl {max_kl:g}"
        )


class AuditedBackend:
    """A :class:`~rakv_cluster.serving.backend.Backend` whose blended requests are audited.

    One audit runs at a time; requests that would need a second one meanwhile are not audited. A
    request that forces its fraction, or wants log-probabilities of its own, never is.
    """

    def __init__(
        self, backend: Backend, metrics: ServiceMetrics, settings: AuditSettings | None = None
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._audits = Audits(settings or AuditSettings())
        self._running: set[asyncio.Task[None]] = set()

    async def describe(self) -> ModelCard:
        """As the backend does."""
        return await self._backend.describe()

    async def stats(self) -> dict[str, Figures]:
        """As the backend does."""
        return await self._backend.stats()

    async def forget(self, keys: Sequence[bytes]) -> None:
        """As the backend does."""
        await self._backend.forget(keys)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """As the backend does."""
        wish = request.blend
        if request.reuse is not ReuseMode.BLEND or wish.recompute >= 0:
            async with aclosing(self._backend.generate(request)) as events:
                async for event in events:
                    yield event
            return
        refusal = self._audits.refusal(wish.max_kl)
        eligible = not refusal and request.top_logprobs < 0 and not request.forced_ids
        audited = eligible and self._audits.wants(wish.max_kl) and not self._running
        asked = replace(
            request,
            blend=replace(wish, refusal=refusal),
            top_logprobs=COMPARED_TOKENS if audited else request.top_logprobs,
        )
        first: tuple[TokenLogprob, ...] = ()
        async with aclosing(self._backend.generate(asked)) as events:
            async for event in events:
                first = first or event.logprobs[:1]
                approximate = event.stats is not None and event.stats.approximate
                if audited and event.finish is not None and approximate and first:
                    # Not behind the last event: who has that does not come back for more.
                    self._start(request, first[0])
                yield replace(event, logprobs=()) if audited else event

    def _start(self, request: EngineRequest, blended: TokenLogprob) -> None:
        task = asyncio.create_task(self._audit(request, blended))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _audit(self, request: EngineRequest, blended: TokenLogprob) -> None:
        exact = replace(
            request,
            request_id=f"{request.request_id}-audit",
            reuse=ReuseMode.EXACT,
            max_tokens=1,
            min_tokens=0,
            top_logprobs=COMPARED_TOKENS,
            timeout_s=_TIMEOUT_S,
            background=True,
        )
        found: tuple[TokenLogprob, ...] = ()
        try:
            async with aclosing(self._backend.generate(exact)) as events:
                async for event in events:
                    found = found or event.logprobs[:1]
        except RakvError as error:
            log.info("an audit was not done: %s", error.message)
        if not found:
            self._metrics.audits.labels("failed").inc()
            return
        budget = request.blend.max_kl
        p95 = self._audits.note(budget, divergence(dict(found[0].top), dict(blended.top)))
        self._metrics.audits.labels("done").inc()
        self._metrics.audited_kl.set(p95)
        if reason := self._audits.refusal(budget):
            log.warning("blending %s", reason)


def divergence(exact: Mapping[int, float], blended: Mapping[int, float]) -> float:
    """Kullback-Leibler divergence in nats over the likeliest tokens of ``exact``, at least.

    Log-probabilities by token id. A token that is not among the likeliest of ``blended`` counts
    with the least of those, which it cannot exceed.
    """
    if not exact or not blended:
        return 0.0
    least = min(blended.values())
    total = sum(math.exp(p) * (p - blended.get(token, least)) for token, p in exact.items())
    return max(total, 0.0)
