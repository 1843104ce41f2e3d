"""Sends a job's rows with a bounded window and journals each result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rakv_cluster.batch.journal import Journal, RowResult
from rakv_cluster.client import Answer
from rakv_cluster.errors import (
    Overloaded,
    PermissionDenied,
    RakvError,
    Unauthenticated,
    Unavailable,
)

Ask = Callable[[int], Awaitable[Answer]]
"""Asks one row of the service; raises the error tree's classes."""

_NOT_THE_ROWS_FAULT = (Overloaded, PermissionDenied, Unauthenticated, Unavailable)


async def run_rows(
    order: Sequence[int],
    ask: Ask,
    journal: Journal,
    *,
    window: int,
    on_result: Callable[[RowResult], None] = lambda result: None,
) -> None:
    """Ask the rows of ``order``, ``window`` at a time, and journal what comes back.

    A row that the service refuses or fails on is journalled with its error. What is not the row's
    fault (no service, no access) ends the run: raised, with that row left for a later run.
    """
    waiting = iter(order)

    async def work() -> None:
        for index in waiting:
            result = await row_result(index, ask)
            journal.add(result)
            on_result(result)

    workers = [asyncio.create_task(work()) for _ in range(window)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def row_result(index: int, ask: Ask) -> RowResult:
    """What became of one row; raises what is not the row's fault."""
    try:
        answer = await ask(index)
    except _NOT_THE_ROWS_FAULT:
        raise
    except RakvError as error:
        return RowResult(index, error_code=error.code, error=error.message)
    return RowResult(
        index,
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        ttft_s=round(answer.ttft_s, 4),
        total_s=round(answer.total_s, 4),
    )
