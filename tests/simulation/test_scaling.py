"""Scaling in virtual time: Serve's loop around the policy, over replicas with prompts in line."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from rakv_cluster.routing.autoscaling import ReplicaLoad, wanted_replicas

START_S, UP_S, DOWN_S, MOST = 20, 10, 300, 8
PREFILL_S, DECODE_S, SLOTS = 0.2, 0.3, 8
BUSY_OVER_S = 60.0


@dataclass
class Line:
    """A replica: prompts one after another, the answers beside them."""

    free_s: float
    ends_s: list[float] = field(default_factory=list)

    def take(self, at_s: float) -> float:
        """Serve a prompt; returns the time to its first token."""
        self.free_s = max(self.free_s, at_s) + PREFILL_S
        self.ends_s.append(self.free_s)
        return self.free_s - at_s

    def load(self, now_s: float) -> ReplicaLoad:
        """What it would report."""
        open_requests = sum(end + DECODE_S > now_s for end in self.ends_s)
        busy_s = sum(
            PREFILL_S * math.exp((e - now_s) / BUSY_OVER_S) for e in self.ends_s if e <= now_s
        )
        self.ends_s = [end for end in self.ends_s if end > now_s - 5 * BUSY_OVER_S]
        backlog_ms = 1e3 * max(self.free_s - now_s, 0.0)
        return ReplicaLoad(backlog_ms, open_requests / SLOTS, busy_s / BUSY_OVER_S)


@pytest.mark.parametrize("replicas_of_work", [1.4, 2.4])
def test_steady_work_does_not_make_replicas_come_and_go(replicas_of_work: float) -> None:
    """Where replicas keep up there is no backlog; with one less there would be."""
    rng = np.random.default_rng(1)
    lines, starting = [Line(0.0)], list[int]()
    lately: deque[float] = deque(maxlen=3)
    above_s = below_s = changes = 0
    arrival_s, ttfts = 0.0, []

    for now_s in range(1, 3601):
        lines += [Line(now_s) for at_s in starting if at_s == now_s]
        starting = [at_s for at_s in starting if at_s > now_s]
        while arrival_s < now_s:
            ttfts.append(min(lines, key=lambda line: line.free_s).take(arrival_s))
            arrival_s += rng.exponential(PREFILL_S / replicas_of_work)
        lately.append(wanted_replicas([line.load(now_s) for line in lines], target_backlog_ms=2000))
        there = len(lines) + len(starting)
        target = min(max(math.ceil(np.mean(lately)), 1), MOST)
        above_s = above_s + 1 if target > there else 0
        below_s = below_s + 1 if target < there else 0
        if above_s > UP_S or below_s > DOWN_S:
            starting += [now_s + START_S] * max(target - there, 0)
            del lines[max(target - len(starting), 1) :]
            above_s = below_s = 0
            changes += 1

    assert changes <= 6  # 24 to 33 where backlog and open requests alone count
    assert np.quantile(ttfts, 0.99) < 10 * PREFILL_S  # 13 s and more
    assert replicas_of_work < len(lines) <= replicas_of_work + 2
