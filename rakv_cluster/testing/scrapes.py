"""What /metrics says of the replicas."""

from __future__ import annotations

from collections.abc import Callable

from rakv_cluster.testing.waiting import first_where


def scrape(get: Callable[[], str]) -> str:
    """``get()``'s text of /metrics, asked for again while it leaves out the replicas as late."""
    return first_where(get, lambda text: "\nrakv_engine_running{" in text, "replicas have figures")


def figure(text: str, name: str, label: str = "") -> float:
    """Sum of a metric's samples, of all or of those with ``label``, a text ``name="value"``."""
    begins = f"{name}{{", f"{name} "
    lines = (line for line in text.splitlines() if line.startswith(begins) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def running(get: Callable[[], str]) -> float:
    """Requests that the engines work on."""
    return figure(scrape(get), "rakv_engine_running")


def cancelled(get: Callable[[], str]) -> float:
    """Requests that the engines ended because nobody waited for them any more."""
    return figure(scrape(get), "rakv_engine_finished_total", 'reason="cancelled"')
