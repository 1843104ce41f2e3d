"""Waiting for something that happens in another thread or process, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], bool], what: str, *, timeout_s: float = 30.0) -> None:
    """Return once ``condition()`` holds; ``AssertionError`` naming ``what`` after ``timeout_s``."""
    first_where(condition, bool, what, timeout_s=timeout_s)


def first_where(
    make: Callable[[], T], holds: Callable[[T], bool], what: str, *, timeout_s: float = 30.0
) -> T:
    """The first ``make()`` that ``holds``; ``AssertionError`` naming ``what`` after ``timeout_s``.

    For what is not there at once on a busy machine: KV is stored behind the answer's back and the
    next request waits for it a moment only; a scrape leaves out a replica that is late.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds(made := make()):
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}; last: {made!r:.2000}")
        threading.Event().wait(0.02)
    return made
