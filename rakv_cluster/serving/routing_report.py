"""What a replica measures of itself, in the routers' terms."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rakv_cluster.clock import Clock
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineRequest, RequestStats
from rakv_cluster.reuse.costs import LOAD_FIXED_MS, CostView
from rakv_cluster.routing.autoscaling import ReplicaLoad
from rakv_cluster.routing.hot_set import CAPACITY, encode_hot_set
from rakv_cluster.routing.report import MAX_PACES, ReplicaReport
from rakv_cluster.routing.ticket import work_kind
from rakv_cluster.types import Tier

_DEPTH_TOKENS = 4096
_BATCH = 8
_PACE_GAIN = 0.2
_HOLD_GAIN = 0.1
_SHARE_GAIN = 0.1
_LEAST_TOKENS = 8
_BUSY_OVER_S = 60.0
"""Work that ended counts as of late for so long, by a factor of e."""


class Paces:
    """Ms per emitted token of one request alone, by kind of work, as measured at its end.

    What drafting brings shows in it. Time in a batch is scaled to a batch of one by what steps of
    both sizes cost. Holds the kinds seen last, at most :data:`MAX_PACES`.
    """

    def __init__(self) -> None:
        self._ms: OrderedDict[str, float] = OrderedDict()

    def observe(
        self, kind: str, output_tokens: int, decode_ms: float, costs: CostView, batch: int
    ) -> None:
        """A request that had so many tokens of this replica, in ``decode_ms`` from the first on,
        ended beside ``batch - 1`` others; one of a few tokens says too little."""
        if output_tokens < _LEAST_TOKENS or decode_ms <= 0:
            return
        alone = costs.decode_ms(1) / costs.decode_ms(max(batch, 1))
        ms = decode_ms / (output_tokens - 1) * min(alone, 1.0)
        known = self._ms.get(kind, ms)
        self._ms[kind] = known + _PACE_GAIN * (ms - known)
        self._ms.move_to_end(kind)
        while len(self._ms) > MAX_PACES:
            self._ms.popitem(last=False)

    def by_kind(self) -> dict[str, float]:
        """A copy."""
        return dict(self._ms)


class RoutingReporter:
    """Makes a replica's reports. Called in the replica's event loop only."""

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int,
        token_bytes: int,
        newest_keys: Callable[[int], Sequence[bytes]],
        price_loads: bool,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._slots = slots
        self._token_mb = token_bytes / 1e6
        # What the planner does not price costs the router nothing either.
        self._load_price = float(price_loads)
        self._newest_keys = newest_keys
        self._paces = Paces()
        self._hold_ms = 0.0
        # Of the prompts that ended last, older ones ever less.
        self._prompt_tokens = 0.0
        self._computed_tokens = 0.0
        self._late_ms = 0.0
        self._late_at_s = clock.monotonic_s()

    def ended(self, request: EngineRequest, stats: RequestStats) -> None:
        """Learn from a request that ended, if it began."""
        held_ms = stats.prefill_ms + stats.decode_ms
        if held_ms <= 0:
            return
        self._hold_ms += _HOLD_GAIN * (held_ms - self._hold_ms)
        self._prompt_tokens += stats.prompt_tokens - _SHARE_GAIN * self._prompt_tokens
        self._computed_tokens += stats.computed_tokens - _SHARE_GAIN * self._computed_tokens
        costs = self._engine.costs()
        cached = stats.prompt_tokens - stats.computed_tokens
        self._age_work()
        # Loading is done beside the steps and takes none of their time.
        work_ms = costs.prefill_ms(cached, stats.prompt_tokens)
        self._late_ms = min(self._late_ms + work_ms, 1e3 * _BUSY_OVER_S)
        # The first tokens of an answer that began elsewhere took no time here.
        tokens, batch = stats.output_tokens - len(request.forced_ids), self._engine.stats().running
        self._paces.observe(work_kind(request), tokens, stats.decode_ms, costs, batch)

    def load(self) -> ReplicaLoad:
        """As of now, without the rest of a report: what is in RAM takes a filter to make."""
        stats = self._engine.stats()
        backlog_ms = self._backlog_ms(self._engine.costs())
        self._age_work()
        busy_share = self._late_ms / 1e3 / _BUSY_OVER_S
        return ReplicaLoad(backlog_ms, (stats.running + stats.waiting) / self._slots, busy_share)

    def _age_work(self) -> None:
        now_s = self._clock.monotonic_s()
        self._late_ms *= math.exp((self._late_at_s - now_s) / _BUSY_OVER_S)
        self._late_at_s = now_s

    def _backlog_ms(self, costs: CostView) -> float:
        # Part of what waits will be loaded, not computed: about the part that was of late.
        known = self._prompt_tokens > 0
        computed = self._computed_tokens / self._prompt_tokens if known else 1.0
        shallow = costs.prefill_rate_ms(costs.step_tokens, 0)
        return self._engine.uncomputed_tokens() * shallow * computed

    def report(self) -> ReplicaReport:
        """As of now."""
        stats, costs = self._engine.stats(), self._engine.costs()
        shallow, deep = (costs.prefill_rate_ms(costs.step_tokens, at) for at in (0, _DEPTH_TOKENS))
        per_token = self._token_mb * self._load_price
        plain_ms = costs.decode_ms(1)
        paces = self._paces.by_kind()
        return ReplicaReport(
            backlog_ms=self._backlog_ms(costs),
            open_requests=float(stats.running + stats.waiting),
            slots=float(self._slots),
            prefill_ms=shallow,
            prefill_slope_ms=max(deep - shallow, 0.0) / _DEPTH_TOKENS,
            ram_ms=costs.load_ms_per_mb[Tier.RAM] * per_token,
            disk_ms=costs.load_ms_per_mb[Tier.DISK] * per_token,
            remote_ms=costs.load_ms_per_mb[Tier.REMOTE] * per_token,
            chunk_ms=LOAD_FIXED_MS * self._load_price,
            token_ms=min((plain_ms, *paces.values())),
            token_ms_slope=max(costs.decode_ms(_BATCH) - plain_ms, 0.0) / (_BATCH - 1),
            hold_ms=self._hold_ms,
            pace=paces,
            hot=encode_hot_set(self._newest_keys(CAPACITY)),
        )
