"""Memory of evicted KV, given back to the system.

glibc keeps what is freed for later: blocks of many sizes that come and go leave holes between those
that stay, in whole pages. A RAM tier at its budget grew the process by 0.1 MiB a request that way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

TRIM_BYTES = 64 << 20
"""Freed before the holes are looked for, which takes milliseconds."""


def trim_heap() -> None:
    """Give free pages back, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedBytes:
    """Counts what is freed; gives it back in portions."""

    def __init__(self, trim: Callable[[], None]) -> None:
        self._trim = trim
        self._bytes = 0

    def add(self, count: int) -> None:
        """So many bytes were freed, or will be when their last reader is done."""
        self._bytes += count

    def give_back(self) -> None:
        """Trim if there is enough. Takes milliseconds then: hold no lock."""
        if self._bytes >= TRIM_BYTES:
            self._bytes = 0
            self._trim()
