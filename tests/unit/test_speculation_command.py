"""``rakv speculation report``: what it prints, and one clear line where it cannot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable
from rakv_cluster.speculation.report import figures
from rakv_cluster.speculation.seats import Seat
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.speculation.verification import judge_block
from rakv_cluster.telemetry import Figures
from rakv_cluster.testing import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.speculation import NO_RULE

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18] * 6


def replica_figures() -> Figures:
    """Of a real speculator that has served one request which repeats a phrase."""
    table = CostTable(CostBuckets())
    for rows in (1, 2, 3, 4, 8, 16):
        table.observe(CostSample(rows, 256, 1, 20.0 + rows))
    subject = Speculator(table, ControllerSettings(), ManualClock())
    sequence = subject.begin("auto", np.array(PHRASE[:8]), NO_RULE, prefill_ms=500.0, tokens_left=9)
    done = 8
    while done < len(PHRASE):
        left = len(PHRASE) - done
        plan = subject.plan([Seat(sequence, np.array(PHRASE[:done]), left - 1)])
        chosen = PHRASE[done : done + len(plan.drafts[0]) + 1]
        verdict = judge_block(plan.drafts[0], chosen, tokens_left=left, stop_token_ids=frozenset())
        rows = CostBuckets().rows_edge(1 + len(plan.drafts[0]))
        subject.settle(plan, [verdict], forward_ms=20.0 + rows)
        done += verdict.emitted
    subject.finish(sequence, np.array(PHRASE))
    return figures(subject.report(context_tokens=128))


async def service() -> FastAPI:
    """Answers with a replica's figures to whoever brings the key."""
    routes = FastAPI()

    @routes.get("/v1/cache/stats")
    async def answer(request: Request) -> JSONResponse:
        if request.headers["Authorization"] != "Bearer secret":
            return JSONResponse({"error": {"message": "no key"}}, 403)
        named = {f"speculation_{name}": value for name, value in replica_figures().items()}
        replicas = {"r1": {"engine_running": 0.0, **named}}
        return JSONResponse({"shards_by_node": {}, "replicas": replicas})

    return routes


@pytest.fixture
def url() -> Iterator[str]:
    with http_server(service) as url:
        yield url


def report(url: str, key: str) -> tuple[int, str]:
    arguments = ["speculation", "report", "--url", url, "--api-key", key]
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


def test_prints_costs_break_even_and_hindsight(url: str) -> None:
    code, output = report(url, "secret")

    assert code == 0
    assert "replica r1: plain step 21.0 ms" in output
    fifteen = next(line.split() for line in output.splitlines() if line.split()[:1] == ["15"])
    assert fifteen[1] == "1.71"
    assert "acceptance by place in the block" in output
    assert "of 1 requests" in output
    assert "time against never drafting: -" in output


def test_a_refusal_is_one_line(url: str) -> None:
    code, output = report(url, "wrong")

    assert code == 2
    assert "no key" in output


def test_no_service_is_one_line() -> None:
    code, output = report("http://127.0.0.1:9", "")

    assert code == 2
    assert "no answer from http://127.0.0.1:9" in output
