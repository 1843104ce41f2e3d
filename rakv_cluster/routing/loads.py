"""How busy each replica is: what it reported, and what was sent to it since.

A report is some time old when it arrives, so requests sent since it was made are added to it.
Backlog is work, and work gets done: it shrinks by one ms per ms. What is booked at choice time
therefore needs no answer to fade.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rakv_cluster.routing.score import Floats


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """A report counts as at most ``max_report_age_s`` old, whatever the clocks of its sender say.

    ``booking_ttl_s``: a request sent counts as open for so long unless a report or its end
    comes first. After ``stale_s`` without a report a replica counts as at least as busy as the
    median of the others: silence is not idleness. Work sent is recent for ``recent_s`` or so.
    """

    max_report_age_s: float = 1.2
    booking_ttl_s: float = 5.0
    stale_s: float = 8.0
    recent_s: float = 20.0


@dataclass(frozen=True, slots=True)
class _Booking:
    replica: int
    work_ms: float
    at_s: float


class Loads:
    """Backlog and open requests of R replicas by index. Used by one thread.

    Memory is bounded by the requests of ``booking_ttl_s``.
    """

    def __init__(self, replicas: int, settings: LoadSettings, now_s: float) -> None:
        self._settings = settings
        self._backlog_ms = np.zeros(replicas)
        self._backlog_at_s = np.full(replicas, now_s)
        self._reported_at_s = np.full(replicas, now_s)
        self._busy_at_s = np.full(replicas, now_s)
        self._recent_ms = np.zeros(replicas)
        self._recent_at_s = now_s
        self._reported_open = np.zeros(replicas)
        self._booked_open = np.zeros(replicas)
        self._bookings: OrderedDict[str, _Booking] = OrderedDict()
        self._of: list[dict[str, None]] = [{} for _ in range(replicas)]

    def __len__(self) -> int:
        return len(self._bookings)

    def arranged(self, sources: Sequence[int], now_s: float) -> Loads:
        """The same for another set of replicas: each one's state is that of ``sources``, idle
        where that is -1."""
        other = Loads(len(sources), self._settings, now_s)
        kept = [index for index, source in enumerate(sources) if source >= 0]
        taken = [sources[index] for index in kept]
        self._age_recent(now_s)
        for name in (
            "_backlog_ms", "_backlog_at_s", "_reported_at_s", "_busy_at_s", "_reported_open",
            "_recent_ms",
        ):  # fmt: skip
            getattr(other, name)[kept] = getattr(self, name)[taken]
        places = dict(zip(taken, kept, strict=True))
        for request_id, booking in self._bookings.items():
            if booking.replica in places:
                place = places[booking.replica]
                other._add(request_id, _Booking(place, booking.work_ms, booking.at_s))
        return other

    def report(
        self, replica: int, backlog_ms: float, open_requests: float, age_s: float, now_s: float
    ) -> None:
        """A replica said how busy it was ``age_s`` ago; NaN is unknown.

        Without a number, what was estimated stays; without an age, the report counts as old.
        """
        longest_s = self._settings.max_report_age_s
        made_s = now_s - (longest_s if math.isnan(age_s) else min(max(age_s, 0.0), longest_s))
        sent = [(each, self._bookings[each]) for each in self._of[replica]]
        self._reported_at_s[replica] = now_s
        if not math.isnan(open_requests):
            self._reported_open[replica] = open_requests
            for request_id, booking in sent:
                if booking.at_s < made_s:
                    self._remove(request_id)
        if open_requests > 0 or backlog_ms > 0 or self._of[replica]:
            self._busy_at_s[replica] = now_s
        if not math.isnan(backlog_ms):
            self._backlog_ms[replica] = backlog_ms
            self._backlog_at_s[replica] = made_s
            for _, booking in sent:
                if booking.at_s >= made_s:
                    self._queue_work(replica, booking.work_ms, booking.at_s)

    def book(self, request_id: str, replica: int, work_ms: float, now_s: float) -> None:
        """A request goes to a replica; one that was booked elsewhere moves."""
        if request_id in self._bookings:
            before = self._remove(request_id)
            for work in (self._backlog_ms, self._recent_ms):
                work[before.replica] = max(work[before.replica] - before.work_ms, 0.0)
        self._add(request_id, _Booking(replica, work_ms, now_s))
        self._busy_at_s[replica] = now_s
        self._queue_work(replica, work_ms, now_s)
        self._age_recent(now_s)
        self._recent_ms[replica] += work_ms

    def complete(self, request_id: str, replica: int) -> None:
        """A request ended on ``replica``, well or not."""
        if request_id in self._bookings:
            self._remove(request_id)
        elif self._reported_open[replica] >= 1:
            self._reported_open[replica] -= 1

    def forget(self, replica: int) -> None:
        """What a replica said is too old: it is taken to have as many open requests as the others,
        and what was sent to it since."""
        self._reported_open[replica] = math.nan

    def idle_s(self, replica: int, now_s: float) -> float:
        """How long ago a replica was last known to have work in hand."""
        return now_s - float(self._busy_at_s[replica])

    def backlog_ms(self, now_s: float) -> Floats:
        """Work in front of a new request on each replica."""
        waited_ms = (now_s - self._backlog_at_s) * 1e3
        backlog: Floats = np.maximum(self._backlog_ms - waited_ms, 0.0)
        stale = now_s - self._reported_at_s > self._settings.stale_s
        if stale.any() and not stale.all():
            backlog[stale] = np.maximum(backlog[stale], np.median(backlog[~stale]))
        return backlog

    def recurring_ms(self, now_s: float) -> Floats:
        """Work that will come to each replica soon and wait there, as sessions go on.

        About what came lately will come again: work sent fades by a factor of e in ``recent_s``.
        The share of that time that it takes, at most 1, is the chance that it finds the replica
        busy; what finds it idle holds nobody up.
        """
        self._age_recent(now_s)
        busy = np.minimum(self._recent_ms / (1e3 * self._settings.recent_s), 1.0)
        return self._recent_ms * busy

    def open_requests(self, now_s: float) -> Floats:
        """Requests that each replica has in hand."""
        while self._bookings:
            request_id, oldest = next(iter(self._bookings.items()))
            if oldest.at_s > now_s - self._settings.booking_ttl_s:
                break
            self._remove(request_id)
        reported, unknown = self._reported_open, np.isnan(self._reported_open)
        if unknown.any():
            known = reported[~unknown]
            reported = np.where(unknown, np.median(known) if len(known) else 0.0, reported)
        return reported + self._booked_open

    def _age_recent(self, now_s: float) -> None:
        self._recent_ms *= math.exp((self._recent_at_s - now_s) / self._settings.recent_s)
        self._recent_at_s = now_s

    def _queue_work(self, replica: int, work_ms: float, at_s: float) -> None:
        waited_ms = (at_s - self._backlog_at_s[replica]) * 1e3
        self._backlog_ms[replica] = max(self._backlog_ms[replica] - waited_ms, 0.0) + work_ms
        self._backlog_at_s[replica] = at_s

    def _add(self, request_id: str, booking: _Booking) -> None:
        self._bookings[request_id] = booking
        self._of[booking.replica][request_id] = None
        self._booked_open[booking.replica] += 1

    def _remove(self, request_id: str) -> _Booking:
        booking = self._bookings.pop(request_id)
        del self._of[booking.replica][request_id]
        self._booked_open[booking.replica] -= 1
        return booking
