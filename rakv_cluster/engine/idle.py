"""The model for work that nobody waits for: its forwards run when the engine has nothing to do."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from rakv_cluster.errors import Unavailable
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.model.step import Runner, Step

log = logging.getLogger(__name__)


class IdleRunner:
    """A runner that any other thread may use while ``runner`` belongs to the engine's.

    :meth:`forward` waits until the engine's thread has run it in an idle moment
    (:meth:`run_one`). What a forward takes is what a request that arrives meanwhile waits: keep
    steps short.
    """

    def __init__(self, runner: Runner, wake: Callable[[], None]) -> None:
        self._runner = runner
        self._wake = wake
        self._lock = threading.Lock()
        self._queued: deque[tuple[Step, Future[torch.Tensor]]] = deque()
        self._closed = False

    @property
    def layout(self) -> KvLayout:
        """As the model's."""
        return self._runner.layout

    @property
    def vocab_size(self) -> int:
        """As the model's."""
        return self._runner.vocab_size

    @property
    def context_tokens(self) -> int:
        """As the model's."""
        return self._runner.context_tokens

    @property
    def device(self) -> torch.device:
        """As the model's."""
        return self._runner.device

    @property
    def waits(self) -> bool:
        """Whether a forward is queued; any thread may ask."""
        return bool(self._queued)

    def forward(self, step: Step) -> torch.Tensor:
        """As the model's, on the CPU, sooner or later; raises :class:`Unavailable` once closed."""
        done: Future[torch.Tensor] = Future()
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is stopping")
            self._queued.append((step, done))
        self._wake()
        return done.result()

    def run_one(self) -> bool:
        """Run one queued forward; False if there is none. The engine's thread alone calls it."""
        with self._lock:
            if not self._queued:
                return False
            step, done = self._queued.popleft()
        try:
            # A copy: the next step may use the same memory before the other thread looks.
            done.set_result(self._runner.forward(step).cpu().clone())
        except Exception as error:  # whoever asked has to cope; the engine goes on
            log.warning("a forward in idle time failed", exc_info=True)
            done.set_exception(error)
        return True

    def close(self) -> None:
        """Nothing is run from now on; whoever waits gets :class:`Unavailable`."""
        with self._lock:
            self._closed = True
            queued, self._queued = self._queued, deque()
        for _, done in queued:
            done.set_exception(Unavailable("the engine is stopping"))
