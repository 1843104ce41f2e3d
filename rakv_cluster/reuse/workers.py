"""A few daemon threads for work that may block on the store.

The standard executor joins its threads at interpreter exit, so one read that hangs would hang the
process; these do not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Job = Callable[[], None]


class Workers(Protocol):
    """Runs jobs. A job handles its own errors."""

    def submit(self, job: Job) -> bool:
        """Queue ``job``; False if the queue is full or closed."""
        ...

    def close(self, timeout_s: float) -> None:
        """Run what is queued, for at most ``timeout_s``, then stop taking part."""
        ...


class ThreadWorkers:
    """``threads`` daemon threads behind one bounded queue."""

    def __init__(self, name: str, *, threads: int, queue_limit: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(queue_limit)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """See :class:`Workers`."""
        if self._closed.is_set():
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """See :class:`Workers`."""
        self._closed.set()
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return  # every thread hangs in a job; daemon threads do not hold the process
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
