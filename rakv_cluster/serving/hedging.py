"""A second dispatch for a request whose first token is late (Dean and Barroso, "The Tail at
Scale", 2013). Off by default: it computes some prompts twice.

Decoding is a function of prompt, request and seed, so both answers are the same; only one is read.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rakv_cluster.serving.first_event import Call, Events, end, start

_WINDOW = 256
_LEAST = 32
_SAVED = 5.0


class HedgePolicy:
    """When to dispatch again: once all but ``share`` of the last requests had their first token.

    Under rising load every request is late by that measure; so no more than ``share`` of all
    requests are hedged, five in a row at most. A ``share`` of 0 hedges nothing. One event loop.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._ttft_s: deque[float] = deque(maxlen=_WINDOW)
        self._budget = 0.0

    def after_s(self) -> float:
        """A request arrives: seconds to wait for its first token, infinite if it is not hedged."""
        self._budget = min(self._budget + self._share, _SAVED)
        if not self._share or len(self._ttft_s) < _LEAST:
            return math.inf
        return float(np.quantile(self._ttft_s, 1.0 - self._share))

    def observe(self, ttft_s: float) -> None:
        """A request had its first token."""
        self._ttft_s.append(ttft_s)

    def take(self) -> bool:
        """Spend one hedge; whether there was one left."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True


async def hedged(
    events: Events,
    after_s: float,
    again: Callable[[], Sequence[Events]],
    won: Callable[[bool], None],
) -> Events:
    """``events``, or those of a second dispatch if it is faster from ``after_s`` seconds on.

    ``again`` makes the second dispatch, or none. Whichever speaks first is read to its end, the
    other is closed; ``won`` hears whether that was the second. A call that fails is out of the
    race; raises what the last one raised.
    """
    calls = [start(events)]
    try:
        done, _ = await asyncio.wait([calls[0].first], timeout=after_s)
        if not done:
            calls += [start(each) for each in again()]
        winner = await _fastest(calls)
        first = winner.first.result()
        if len(calls) > 1:
            won(winner is calls[1])
        for call in calls:
            if call is not winner:
                await end(call)
        yield first
        async for event in winner.events:
            yield event
    finally:
        for call in calls:
            await end(call)


async def _fastest(calls: Sequence[Call]) -> Call:
    """The call whose first event is there first; the last to fail if all do."""
    running = list(calls)
    while True:
        await asyncio.wait([call.first for call in running], return_when=asyncio.FIRST_COMPLETED)
        for call in [call for call in running if call.first.done()]:
            if len(running) == 1 or call.first.exception() is None:
                return call
            running.remove(call)
