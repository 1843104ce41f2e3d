"""Telling callers what happened to their requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many

from rakv_cluster.clock import Clock
from rakv_cluster.engine.request import EngineEvent
from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.engine.stats import Counters
from rakv_cluster.model.sampling import Choice
from rakv_cluster.types import FinishReason, TokenLogprob

log = logging.getLogger(__name__)


class Emitter:
    """Builds events and hands them to sinks."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters

    def emit(
        self,
        sequence: Sequence,
        *,
        taken: Many[Choice] = (),
        finish: FinishReason | None = None,
        stop_token_id: int = -1,
        error: str = "",
    ) -> bool:
        """Send one event, with the tokens of ``taken`` if any; False if the sink is broken."""
        wants_stats = finish is not None or not sequence.stats_sent
        sequence.stats_sent = True
        event = EngineEvent(
            request_id=sequence.request.request_id,
            token_ids=tuple(choice.token_id for choice in taken),
            logprobs=tuple(
                TokenLogprob(choice.token_id, choice.logprob, choice.top)
                for choice in taken
                if choice.logprob is not None
            ),
            finish=finish,
            stop_token_id=stop_token_id,
            stats=sequence.stats(self._clock.monotonic_s()) if wants_stats else None,
            error=error,
        )
        if finish is not None:
            self._counters.finish(finish.value)
        try:
            sequence.sink(event)
        except Exception:  # a caller's bug must not stop other requests
            self._counters.sink_failures += 1
            log.exception("the sink of request %s failed", sequence.request.request_id)
            return False
        return True
