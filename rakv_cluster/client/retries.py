"""When a client tries again, and how long it waits before. No network and no clock here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from rakv_cluster.errors import Overloaded, RakvError, Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most ``attempts`` tries. The wait doubles from ``first_s`` up to ``max_s``, and half of it
    is drawn at random, so that clients which were refused together do not return together.

    A server that asks for a longer wait than ``max_s`` gets no further try.
    """

    attempts: int = 4
    first_s: float = 0.5
    max_s: float = 30.0

    def wait_s(self, error: RakvError, tried: int, random: Random) -> float:
        """Seconds until the next try after ``tried`` ones; -1 if there is to be none.

        Only what says "not now" is worth another try: no or a broken connection, 429, 503. A
        request changes nothing but the cache, so sending it twice is safe.
        """
        asked_s = error.retry_after_s or 0.0
        again = isinstance(error, Overloaded | Unavailable)
        if not again or tried >= self.attempts or asked_s > self.max_s:
            return -1.0
        backoff_s = min(self.max_s, self.first_s * 2.0 ** (tried - 1))
        return max(asked_s, backoff_s * (0.5 + random.random() / 2))

    def run(self, attempt: Callable[[], T], random: Random, sleep: Callable[[float], None]) -> T:
        """What ``attempt`` returns, tried as often as this allows; raises its last error."""
        tried = 0
        while True:
            tried += 1
            try:
                return attempt()
            except RakvError as error:
                wait_s = self.wait_s(error, tried, random)
                if wait_s < 0:
                    raise
            sleep(wait_s)

    async def run_async(
        self,
        attempt: Callable[[], Awaitable[T]],
        random: Random,
        sleep: Callable[[float], Awaitable[None]],
    ) -> T:
        """As :meth:`run`, awaited."""
        tried = 0
        while True:
            tried += 1
            try:
                return await attempt()
            except RakvError as error:
                wait_s = self.wait_s(error, tried, random)
                if wait_s < 0:
                    raise
            await sleep(wait_s)


NO_RETRIES = RetryPolicy(attempts=1)
