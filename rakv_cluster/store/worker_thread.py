"""One thread that runs jobs in order: the owner of a write transaction, or of background writes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rakv_cluster.errors import StoreUnavailable

T = TypeVar("T")
_log = logging.getLogger(__name__)


class WorkerThread:
    """Runs jobs one after another, and ``on_idle`` when none came for ``idle_s`` seconds.

    At most ``queue_limit`` jobs wait.
    """

    def __init__(
        self,
        name: str,
        *,
        queue_limit: int,
        on_idle: Callable[[], None] | None = None,
        idle_s: float = 1.0,
    ) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._queue_limit = queue_limit
        self._on_idle = on_idle
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T]) -> T:
        """Run a job and return its result or raise its error; waits while the queue is full.

        Raises ``StoreUnavailable`` when the thread is closed.
        """
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                future.set_exception(error)

        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._jobs) < self._queue_limit)
            if self._closed:
                raise StoreUnavailable(f"{self._thread.name} is closed")
            self._jobs.append(call)
            self._changed.notify_all()
        return future.result()

    def post(self, job: Callable[[], None]) -> bool:
        """Queue a job without waiting; False when the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._jobs) >= self._queue_limit:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            try:
                job()
            except Exception:  # noqa: BLE001  # a failed background job must not end the thread
                _log.exception("background job failed")
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """The next job, the idle job, or None at the end."""
        timeout_s = self._idle_s if self._on_idle else None
        with self._changed:
            ready = self._changed.wait_for(lambda: self._closed or bool(self._jobs), timeout_s)
            if ready and not self._jobs:
                return None
            self._busy = True
            job = self._jobs.popleft() if self._jobs else self._on_idle
            self._changed.notify_all()
            return job
