"""Which thread computes.

PyTorch's CPU kernels run on OpenMP, which keeps a team of threads for every thread that ever
computed in parallel. Once the teams together have more threads than there are cores, GNU's OpenMP
hardly spins between two parallel regions any more but sleeps and wakes: a decode step of some three
hundred short regions then takes 1.6 times as long (docs/experiments.md). So a replica has one
thread that computes, the engine's; whatever else has to, before, does it in a thread that ends, and
takes its team with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this thread computes without others: it gets no team that would slow the engine's.

    Threads that are started meanwhile by other threads begin with the same setting: it is
    PyTorch's initial one for all.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def aside(call: Callable[[], T]) -> T:
    """The result of ``call``, made in a thread of its own that has ended; raises what it raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="rakv-aside") as executor:
        return executor.submit(call).result()
