"""The governor's bounds for any costs, any drafters, any batch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets
from rakv_cluster.speculation.governor import (
    WINDOW_SHARE,
    WINDOW_TOKENS,
    GovernorMode,
    GovernorSettings,
    ReplicaLedger,
)
from rakv_cluster.testing.speculation import Guess, Script, SimulatedReplica

ROWS = (1, 2, 3, 4, 8, 16, 32)

# Extra ms over one row, for each rows bucket; not sorted: real costs are not monotone.
costs = st.lists(st.floats(0.0, 200.0), min_size=len(ROWS) - 1, max_size=len(ROWS) - 1)
guesses = st.builds(
    Guess, length=st.integers(0, 15), right=st.integers(0, 15), match_tokens=st.integers(2, 40)
)
scripts = st.lists(guesses, min_size=1, max_size=12)


def repeated(guesses: list[Guess]) -> Script:
    return lambda position: guesses[position % len(guesses)]


def simulated(mode: GovernorMode, extra_ms: list[float]) -> SimulatedReplica:
    step_ms = dict(zip(ROWS, [20.0, *(20.0 + extra for extra in extra_ms)], strict=True))
    subject = SimulatedReplica(
        lambda rows, batch: step_ms[min(edge for edge in ROWS if edge >= rows)],
        ControllerSettings(governor=GovernorSettings(mode)),
        buckets=CostBuckets(rows=ROWS),
    )
    for batch in range(1, 5):
        subject.seed_costs(batch)
    return subject


@settings(deadline=None, max_examples=60)
@given(costs, st.lists(scripts, min_size=1, max_size=4), st.integers(1, 300))
def test_bucket(extra_ms: list[float], requests: list[list[Guess]], output_tokens: int) -> None:
    """No window of 1,000 tokens loses more than a capacity's worth of tokens."""
    subject = simulated(GovernorMode.BUCKET, extra_ms)

    steps = subject.run([repeated(script) for script in requests], output_tokens=output_tokens)

    for first in range(0, len(steps), max(1, len(steps) // 10)):
        overspend_ms = largest_ms = 0.0
        tokens = 0
        for step in steps[first:]:
            overspend_ms += step.ms - step.plain_time_ms
            tokens += step.tokens
            if tokens > WINDOW_TOKENS:
                break
            largest_ms = max(largest_ms, step.plain_ms / len(step.emitted))
            assert overspend_ms <= WINDOW_SHARE * WINDOW_TOKENS * largest_ms + 1e-6


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(GovernorMode.BUCKET, 0.05), (GovernorMode.STRICT, 0.01)]),
    costs,
    st.lists(scripts, min_size=1, max_size=4),
    st.integers(1, 300),
    st.floats(0.0, 1_000.0),
)
def test_every_request(
    mode_and_share: tuple[GovernorMode, float],
    extra_ms: list[float],
    requests: list[list[Guess]],
    output_tokens: int,
    prefill_ms: float,
) -> None:
    """At every moment, for every request: its share of its own plain time, prefill included."""
    mode, share = mode_and_share
    subject = simulated(mode, extra_ms)
    spent = [prefill_ms] * len(requests)
    plain = [prefill_ms] * len(requests)
    left = [output_tokens] * len(requests)

    steps = subject.run(
        [repeated(script) for script in requests],
        output_tokens=output_tokens,
        prefill_ms=prefill_ms,
    )

    for step in steps:
        running = [index for index in range(len(requests)) if left[index]]
        for index, tokens in zip(running, step.emitted, strict=True):
            spent[index] += step.ms
            plain[index] += step.plain_ms * tokens
            left[index] -= tokens
            assert spent[index] <= (1 + share) * plain[index] + 1e-6
    assert not any(left)


@settings(deadline=None, max_examples=30)
@given(costs, scripts)
def test_decisions_are_reproducible(extra_ms: list[float], script: list[Guess]) -> None:
    runs = [
        simulated(GovernorMode.BUCKET, extra_ms).run([repeated(script)], output_tokens=60)
        for _ in range(2)
    ]

    assert runs[0] == runs[1]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(5.0, 100.0), st.floats(-60.0, 60.0), st.integers(0, 9)),
        min_size=1, max_size=400,
    ),
    st.floats(5.0, 100.0),
)  # fmt: skip
def test_no_window_has_less_left_than_the_ledger_says(
    booked: list[tuple[float, float, int]], token_ms: float
) -> None:
    replica = ReplicaLedger()
    begins = []
    for step_ms, overspend_ms, tokens in booked:
        begins.append((replica.tokens, replica.plain_ms, replica.overspend_ms))
        replica.book(plain_ms=step_ms * tokens, overspend_ms=overspend_ms, tokens=tokens)

    left_ms = replica.left_ms(token_ms)

    for place, plain_ms, overspend_ms in begins:
        to_come = place + WINDOW_TOKENS - replica.tokens
        if to_come > 0:
            window_ms = replica.plain_ms - plain_ms + to_come * token_ms
            lost_ms = replica.overspend_ms - overspend_ms
            assert left_ms <= WINDOW_SHARE * window_ms - lost_ms + 1e-6
