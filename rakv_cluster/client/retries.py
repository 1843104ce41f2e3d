"""When a client tries again, and how long it waits before. No network and no clock here."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rakv_cluster.errors import Overloaded, RakvError, Unavailable


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


NO_RETRIES = RetryPolicy(attempts=1)
