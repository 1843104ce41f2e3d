"""Clients that ask without pause while something else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def traffic(clients: int, ask: Callable[[int, int], None]) -> Iterator[None]:
    """``clients`` threads call ``ask(client, number)``, for number after number from 1 on, until
    the context ends; raises what a call raised."""
    over = threading.Event()

    def run(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            ask(client, number)

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(run, client) for client in range(clients)]
        try:
            yield
        finally:
            over.set()
            for each in running:
                each.result()
