"""Thread-safe named counters; every name that can appear is declared up front."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Counters:
    """Counts since start. Unknown names raise ``KeyError``: a typo must not make a new counter."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more of ``name``."""
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment."""
        with self._lock:
            return dict(self._values)
