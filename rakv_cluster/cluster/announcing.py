"""The thread beside a shard that keeps the directory's partitions told.

It sends to all partitions at once and waits for the slowest, so one that stalls delays news to the
others by its timeout, until its circuit breaker opens after a few rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from rakv_cluster.clock import Clock
from rakv_cluster.cluster.directory import Announcement, Announcer
from rakv_cluster.cluster.messages import parse_flag
from rakv_cluster.cluster.peers import Answer, Call, Peers

News: TypeAlias = Callable[[Announcer], None]

_RETRY_S = 0.5
_COALESCE_S = 0.02  # commits come in bursts; one message tells of them all


class AnnouncingThread:
    """Owns an :class:`Announcer` and sends what it composes. Methods may be called from any thread.

    ``heartbeat_s`` bounds how long a restarted partition stays empty, and how long it takes until
    ``stored`` (all keys now stored) corrects what was missed, for example a shard that was
    replaced because it was damaged.
    """

    def __init__(
        self,
        announcer: Announcer,
        peers: Peers,
        stored: Callable[[], Sequence[bytes]],
        clock: Clock,
        *,
        heartbeat_s: float,
        timeout_s: float,
    ) -> None:
        self._announcer = announcer
        self._peers = peers
        self._stored = stored
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._news: list[News] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rakv-announcer", daemon=True)
        self._thread.start()

    def record(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell that the shard stored ``added`` and dropped ``removed``."""
        self._tell(lambda announcer: announcer.record(added, removed))

    def set_nodes(self, nodes: Iterable[str]) -> None:
        """Tell which partitions there are."""
        self._tell(lambda announcer: announcer.set_nodes(nodes))

    def recheck(self) -> None:
        """Tell what was stored or dropped without a word, now and not with the next heartbeat."""
        self._tell(lambda announcer: announcer.hold(self._stored()))

    def close(self) -> None:
        """End the thread after what it is sending. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _tell(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()

    def _run(self) -> None:
        beat_at_s = self._clock.monotonic_s()
        wait_s = 0.0
        while self._woken(wait_s):
            beat = self._clock.monotonic_s() >= beat_at_s
            if beat:
                beat_at_s += self._heartbeat_s
                # Asked before the news is taken: what is stored in between comes after it, as news.
                self._announcer.hold(self._stored())
            with self._changed:
                news, self._news = self._news, []
            for tell in news:
                tell(self._announcer)
            answered = self._send(self._announcer.messages(heartbeat=beat))
            wait_s = max(beat_at_s - self._clock.monotonic_s(), 0.0)
            wait_s = wait_s if answered else min(_RETRY_S, wait_s)

    def _woken(self, wait_s: float) -> bool:
        """Wait for news, at most ``wait_s``; false at the end."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closing or bool(self._news), wait_s):
                self._changed.wait_for(lambda: self._closing, _COALESCE_S)
            return not self._closing

    def _send(self, messages: dict[str, Announcement]) -> bool:
        """Send until nothing is left to say; false where a partition did not answer."""
        while messages:
            calls = [Call(node, "announce", (message,)) for node, message in messages.items()]
            outcomes = self._peers.ask(calls, self._timeout_s, parse_flag)
            for (node, message), outcome in zip(messages.items(), outcomes, strict=True):
                if isinstance(outcome, Answer):
                    self._announcer.answered(node, message, accepted=outcome.value)
            if not all(isinstance(outcome, Answer) for outcome in outcomes):
                return False
            messages = self._announcer.messages()
        return True
