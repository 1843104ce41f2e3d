"""What a replica tells the routers, measured by a real engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import aclosing

import httpx
import pytest

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineRequest, RequestStats
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.reuse.costs import Costs
from rakv_cluster.routing.report import MAX_PACES, decode_report, encode_report
from rakv_cluster.serving.routing_report import Paces, RoutingReporter
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import LIMITS, NAMESPACE, bare_engine, no_cuts
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.service import LocalService, StartLocal


def ask(http: httpx.Client, **fields: object) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello " * 60}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    http.post("/v1/chat/completions", json={**body, **fields}).raise_for_status()


def test_every_cost_is_known_from_the_start(local: LocalService) -> None:
    heard = decode_report(encode_report(local.replica.routing_report(), wall_s=1.7e9))
    assert not any(math.isnan(value) for value in heard.numbers())
    assert heard.prefill_ms > 0
    assert heard.token_ms > 0
    assert heard.open_requests == heard.backlog_ms == 0


def test_pace_is_learned_by_kind_of_work(local: LocalService, http: httpx.Client) -> None:
    ask(http)
    http.post(
        "/v1/completions", json={"prompt": "Hello", "max_tokens": 16, "ignore_eos": True}
    ).raise_for_status()
    report = local.replica.routing_report()
    assert set(report.pace) == {"chat/", "completions/"}
    assert report.token_ms <= min(report.pace.values())
    assert report.hold_ms > 0


def test_what_a_stop_string_ends_is_learned_from_too(
    start_local: StartLocal, http: httpx.Client
) -> None:
    asked = {"prompt": "Hello", "max_tokens": 64, "ignore_eos": True, "temperature": 0}
    text = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    other = start_local()

    answer = httpx.post(f"{other.url}/v1/completions", json={**asked, "stop": text[16:20]}).json()

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] > 8  # of fewer no pace is learned
    report = other.replica.routing_report()
    assert set(report.pace) == {"completions/"}
    assert report.hold_ms > 0


async def test_what_a_client_leaves_is_learned_from_too(
    local: LocalService, tiny_model: LoadedModel
) -> None:
    cuts = CutTable.from_tokenizer(tiny_model.tokenizer)
    asked = EngineRequest(
        "left", chunk_prompt(NAMESPACE, [[5, 6, 7]], cuts, LIMITS), 1500, endpoint="leaving"
    )
    tokens = 0

    async with aclosing(local.replica.generate(asked)) as events:
        async for event in events:
            tokens += len(event.token_ids)
            if tokens > 8:  # of fewer no pace is learned
                break
    for _ in range(1000):
        if "leaving/" in local.replica.routing_report().pace:
            break
        await asyncio.sleep(0.01)

    assert "leaving/" in local.replica.routing_report().pace
    assert local.replica.routing_report().hold_ms > 0


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = bare_engine(FakeRunner())
    yield engine
    engine.stop(timeout_s=1.0)


def test_what_waits_will_be_loaded_as_far_as_prompts_of_late_were(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = RoutingReporter(
        engine, slots=4, token_bytes=1, newest_keys=lambda count: (), price_loads=True,
        clock=ManualClock(),
    )  # fmt: skip
    asked = EngineRequest("r", chunk_prompt(NAMESPACE, [[1, 2]], no_cuts(64), LIMITS), 9)
    monkeypatch.setattr(engine, "uncomputed_tokens", lambda: 1000)
    token_ms = reporter.report().prefill_ms
    assert reporter.load().backlog_ms == 1000 * token_ms  # nothing is known yet

    def end(requests: int, computed: int, tokens: int = 500) -> float:
        for _ in range(requests):
            cached = tokens - computed
            stats = RequestStats(tokens, ram_tokens=cached, computed_tokens=computed, prefill_ms=1)
            reporter.ended(asked, stats)
        return reporter.report().backlog_ms / (1000 * token_ms)

    assert end(2000, computed=50) == pytest.approx(0.1)
    assert end(1, computed=10, tokens=10) < 0.11  # short ones say little
    assert end(40, computed=500) > 0.95  # other documents now: not a share of all since the start


def test_an_answer_that_began_elsewhere_teaches_the_pace_of_what_was_added(engine: Engine) -> None:
    reporter = RoutingReporter(
        engine, slots=4, token_bytes=1, newest_keys=lambda count: (), price_loads=True,
        clock=ManualClock(),
    )  # fmt: skip
    prompt = chunk_prompt(NAMESPACE, [[1, 2]], no_cuts(64), LIMITS)
    stats = RequestStats(2, computed_tokens=2, output_tokens=211, prefill_ms=1, decode_ms=100.0)
    reporter.ended(EngineRequest("r", prompt, 211, forced_ids=(3,) * 200), stats)
    assert list(reporter.report().pace.values()) == [pytest.approx(10.0)]


def test_a_replica_says_which_share_of_its_time_prompts_take(engine: Engine) -> None:
    clock = ManualClock()
    reporter = RoutingReporter(
        engine, slots=4, token_bytes=1, newest_keys=lambda count: (), price_loads=True, clock=clock
    )
    asked = EngineRequest("r", chunk_prompt(NAMESPACE, [[1, 2]], no_cuts(64), LIMITS), 9)
    # 300 of 500 tokens computed, twice a second.
    stats = RequestStats(500, ram_tokens=200, computed_tokens=300, prefill_ms=1, load_ms=1e6)
    share = 2 * engine.costs().prefill_ms(200, 500) / 1e3
    assert 0.1 < share < 1

    for _ in range(1000):
        clock.advance(0.5)
        reporter.ended(asked, stats)
    assert reporter.load().busy_share == pytest.approx(share, rel=0.02)
    clock.advance(60.0)
    assert reporter.load().busy_share == pytest.approx(share / math.e, rel=0.02)


def test_who_never_had_a_slot_did_not_hold_it(engine: Engine) -> None:
    reporter = RoutingReporter(
        engine, slots=4, token_bytes=1, newest_keys=lambda count: (), price_loads=True,
        clock=ManualClock(),
    )  # fmt: skip
    asked = EngineRequest("r", chunk_prompt(NAMESPACE, [[1, 2]], no_cuts(64), LIMITS), 9)
    reporter.ended(asked, RequestStats(prefill_ms=200.0, decode_ms=800.0))
    held_ms = reporter.report().hold_ms

    for _ in range(50):  # their time ran out while they waited
        reporter.ended(asked, RequestStats(queue_ms=9000.0))

    assert reporter.report().hold_ms == held_ms > 0


def test_loads_cost_the_router_what_they_cost_the_planner(start_local: StartLocal) -> None:
    priced = start_local(price_loads=True).replica.routing_report()
    unpriced = start_local(price_loads=False).replica.routing_report()
    assert min(priced.ram_ms, priced.disk_ms, priced.remote_ms, priced.chunk_ms) > 0
    assert (unpriced.ram_ms, unpriced.disk_ms, unpriced.remote_ms, unpriced.chunk_ms) == (0,) * 4


def test_pace_is_that_of_a_request_alone() -> None:
    costs = Costs(step_tokens=512)
    for rows, ms in ((1, 10.0), (4, 20.0)):
        costs.observe_decode(rows, ms)
    paces = Paces()
    paces.observe("alone", 11, 100.0, costs.view(0.0), 1)
    paces.observe("batch", 11, 200.0, costs.view(0.0), 4)
    paces.observe("short", 2, 500.0, costs.view(0.0), 1)
    assert paces.by_kind() == {"alone": pytest.approx(10.0), "batch": pytest.approx(10.0)}


def test_paces_are_bounded() -> None:
    costs, paces = Costs(step_tokens=512).view(0.0), Paces()
    for number in range(100):
        paces.observe(f"kind{number}", 20, 100.0, costs, 1)
    assert len(paces.by_kind()) == MAX_PACES
    assert "kind99" in paces.by_kind()
