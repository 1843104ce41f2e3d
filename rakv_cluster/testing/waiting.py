"""Waiting for something that happens in another thread or process, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, *, timeout_s: float = 30.0) -> None:
    """Return once ``condition()`` holds; ``AssertionError`` naming ``what`` after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        threading.Event().wait(0.02)
