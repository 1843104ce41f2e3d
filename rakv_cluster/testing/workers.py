"""Workers that run jobs when a test says so."""

from __future__ import annotations

from collections.abc import Callable


class InlineWorkers:
    """Runs each job inside ``submit``."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Always True."""
        job()
        return True

    def close(self, timeout_s: float) -> None:
        """Nothing is queued, ever."""


class ManualWorkers:
    """Queues jobs until :meth:`run_one`; a stand-in for threads whose timing a test decides."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> bool:
        """Always True."""
        self.queued.append(job)
        return True

    def run_one(self, index: int = 0) -> None:
        """Run one queued job."""
        self.queued.pop(index)()

    def run_all(self) -> None:
        """Run queued jobs, and those that they queue, until none is left."""
        while self.queued:
            self.run_one()

    def close(self, timeout_s: float) -> None:
        """Run what is queued."""
        self.run_all()
