"""Which blended answers are audited, how far they are off, and when blending is shut off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.errors import Unavailable
from rakv_cluster.model.card import ModelCard
from rakv_cluster.serving.audit import AuditedBackend, Audits, AuditSettings, divergence
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.types import (
    BlendWish,
    ChunkedPrompt,
    FinishReason,
    ReuseMode,
    TokenLogprob,
)

SETTINGS = AuditSettings(first=5, every=10, window=4, fewest=3)
EXACT = TokenLogprob(1, math.log(0.7), ((1, math.log(0.7)), (2, math.log(0.3))))
CLOSE = TokenLogprob(1, math.log(0.69), ((1, math.log(0.69)), (2, math.log(0.31))))
FAR = TokenLogprob(2, math.log(0.9), ((2, math.log(0.9)), (1, math.log(0.1))))


class Replicas:
    """Answers one token with given log-probabilities, and keeps what it was asked."""

    def __init__(self, blended: TokenLogprob) -> None:
        self.blended = blended
        self.asked: list[EngineRequest] = []
        self.broken = False

    async def describe(self) -> ModelCard:
        raise NotImplementedError

    async def stats(self) -> dict[str, Figures]:
        return {}

    async def forget(self, keys: Sequence[bytes]) -> None:
        raise NotImplementedError

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.asked.append(request)
        blends = request.reuse is ReuseMode.BLEND and not request.blend.refusal
        if self.broken and not blends:
            raise Unavailable("gone")
        logprobs = (self.blended if blends else EXACT,) if request.top_logprobs >= 0 else ()
        stats = RequestStats(blended_tokens=int(blends), blend_refusal=request.blend.refusal)
        yield EngineEvent("r", (1,), logprobs, stats=stats)
        yield EngineEvent("r", (), finish=FinishReason.LENGTH, stats=stats)


def blend(number: int, **fields: object) -> EngineRequest:
    prompt = ChunkedPrompt(bytes(32), (1, 2), (), 0, bytes(32))
    return EngineRequest(f"r{number}", prompt, 2, reuse=ReuseMode.BLEND, **fields)  # type: ignore[arg-type]  # passed through


async def answered(backend: AuditedBackend, request: EngineRequest) -> list[EngineEvent]:
    """Events up to the last one, behind which a service reads no further."""
    events: list[EngineEvent] = []
    async with aclosing(backend.generate(request)) as answer:
        async for event in answer:
            events.append(event)
            if event.finish is not None:
                break
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others)
    await asyncio.sleep(0)  # for what is done when a task has ended
    return events


def audited(asked: Sequence[EngineRequest]) -> int:
    return sum(request.request_id.endswith("-audit") for request in asked)


async def test_the_first_requests_are_audited_and_then_some() -> None:
    replicas = Replicas(CLOSE)
    backend = AuditedBackend(replicas, ServiceMetrics(), SETTINGS)

    for number in range(20):
        events = await answered(backend, blend(number, timeout_s=2.0))
        assert all(event.logprobs == () for event in events)

    assert audited(replicas.asked) == 5 + 2
    exact = next(r for r in replicas.asked if r.request_id.endswith("-audit"))
    assert (exact.reuse, exact.max_tokens) == (ReuseMode.EXACT, 1)
    assert exact.background, "nobody waits for it"
    assert exact.timeout_s > 60, "it may have to wait long, and its request had little time"


async def test_answers_too_far_off_shut_their_budget_and_no_other() -> None:
    replicas = Replicas(FAR)
    metrics = ServiceMetrics()
    backend = AuditedBackend(replicas, metrics, SETTINGS)
    for number in range(3):
        await answered(backend, blend(number, blend=BlendWish(0.1)))

    (first, *_) = await answered(backend, blend(3, blend=BlendWish(0.1)))
    (other, *_) = await answered(backend, blend(4, blend=BlendWish(9.0)))

    assert first.stats is not None
    assert other.stats is not None
    assert "shut off" in first.stats.blend_refusal
    assert not first.stats.approximate
    assert other.stats.approximate
    assert b"rakv_blend_audited_kl" in metrics.render()


async def test_what_has_a_fraction_or_logprobs_of_its_own_is_left_alone() -> None:
    replicas = Replicas(FAR)
    backend = AuditedBackend(replicas, ServiceMetrics(), SETTINGS)

    await answered(backend, blend(1, blend=BlendWish(recompute=0.1)))
    (event, *_) = await answered(backend, blend(2, top_logprobs=3))

    assert audited(replicas.asked) == 0
    assert event.logprobs == (FAR,)


async def test_an_audit_that_fails_is_counted_and_harms_nobody() -> None:
    replicas = Replicas(CLOSE)
    replicas.broken = True
    metrics = ServiceMetrics()

    events = await answered(AuditedBackend(replicas, metrics, SETTINGS), blend(1))

    assert events[-1].finish is FinishReason.LENGTH
    assert b'rakv_blend_audits_total{outcome="failed"} 1.0' in metrics.render()


def test_few_audits_shut_nothing() -> None:
    audits = Audits(SETTINGS)
    audits.note(0.1, 5.0)
    audits.note(0.1, 5.0)

    assert audits.refusal(0.1) == ""
    audits.note(0.1, 5.0)
    assert audits.refusal(0.1) != ""


def test_divergence_is_that_of_the_distributions() -> None:
    exact = dict(EXACT.top)

    assert divergence(exact, exact) == 0.0
    expected = 0.7 * math.log(0.7 / 0.1) + 0.3 * math.log(0.3 / 0.9)
    assert divergence(exact, dict(FAR.top)) == pytest.approx(expected)
    assert divergence(exact, {1: math.log(0.9)}) == pytest.approx(
        max(0.7 * math.log(0.7 / 0.9) + 0.3 * math.log(0.3 / 0.9), 0.0)
    )
    assert divergence({}, exact) == 0.0
