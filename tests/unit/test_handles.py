"""Many replicas asked at once."""

from __future__ import annotations

import asyncio

from rakv_cluster.serving.handles import in_time


async def test_who_is_late_or_fails_hides_no_other() -> None:
    cancelled = asyncio.Event()

    async def answer(number: int) -> int:
        return number

    async def fail() -> int:
        raise ConnectionError("gone")

    async def hang() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 0

    answers = await in_time([answer(1), hang(), fail(), answer(2)], 0.01)

    assert answers == [1, 2]
    await asyncio.wait_for(cancelled.wait(), 10)


async def test_nobody_asked_is_nobody_missing() -> None:
    assert await in_time([], 0.01) == []
