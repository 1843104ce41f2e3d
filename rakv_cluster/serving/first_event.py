"""Calls whose first event is awaited beside something else: another call, or a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeAlias

from rakv_cluster.engine.request import EngineEvent
from rakv_cluster.errors import DeadlineExceeded

Events: TypeAlias = AsyncGenerator[EngineEvent, None]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that runs; ``events`` are those behind ``first``."""

    events: Events
    first: asyncio.Task[EngineEvent]


def start(events: Events) -> Call:
    """Ask for the first of ``events``."""

    async def first() -> EngineEvent:
        return await anext(events)

    return Call(events, asyncio.create_task(first()))


async def end(call: Call) -> None:
    """Close a call, whatever it waits for."""
    call.first.cancel()
    await asyncio.wait([call.first])
    if not call.first.cancelled():
        call.first.exception()  # or asyncio would say that nobody looked at it
    await call.events.aclose()


async def begun(events: Events, within_s: float) -> Events:
    """``events``; raises :class:`DeadlineExceeded` if the first is not there ``within_s``."""
    call = start(events)
    try:
        done, _ = await asyncio.wait([call.first], timeout=within_s)
        if not done:
            raise DeadlineExceeded("no replica answered within the request's time")
        yield call.first.result()
        async for event in events:
            yield event
    finally:
        await end(call)
