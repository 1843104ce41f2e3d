"""From an engine's thread to one coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import chain

from rakv_cluster.engine.request import EngineEvent


class EventBridge:
    """An engine sink that a coroutine of ``loop`` reads from.

    Bounded without ever blocking the engine: events that a slow reader has not taken are merged
    into one, so at most one request's tokens wait here. ``ended`` is called in the loop with the
    last event, before that can be read, and also if nobody reads any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[EngineEvent], None] = lambda event: None,
    ) -> None:
        self._loop = loop
        self._ended = ended
        self._lock = threading.Lock()
        self._waiting: list[EngineEvent] = []
        self._ready = asyncio.Event()

    def __call__(self, event: EngineEvent) -> None:
        """Take an event; called in the engine's thread."""
        if event.finish is not None:
            self._loop.call_soon_threadsafe(self._ended, event)
        with self._lock:
            self._waiting.append(event)
            wake = len(self._waiting) == 1
        if wake:
            self._loop.call_soon_threadsafe(self._ready.set)

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """Events up to the one with ``finish``."""
        finished = False
        while not finished:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                taken, self._waiting = self._waiting, []
            if taken:
                event = merged(taken)
                finished = event.finish is not None
                yield event


def merged(events: Sequence[EngineEvent]) -> EngineEvent:
    """One event that says what these say, in order; all of one request, at least one."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return EngineEvent(
        request_id=last.request_id,
        token_ids=tuple(chain.from_iterable(event.token_ids for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        finish=last.finish,
        stop_token_id=last.stop_token_id,
        stats=next((e.stats for e in reversed(events) if e.stats is not None), None),
        error=last.error,
    )
