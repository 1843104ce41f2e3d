"""``rakv route explain``: what it prints, and one clear line where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.testing.http_server import http_server

TERMS = {
    "expected_ms": 30.0, "backlog_ms": 1.0, "slot_wait_ms": 2.0, "load_ms": 3.0,
    "prefill_ms": 4.0, "decode_ms": 20.0, "crowding_ms": 5.0, "reused_tokens": 64,
}  # fmt: skip
ANSWER = {
    "chosen": "replica2", "reason": "fastest", "measured": True, "prompt_tokens": 99,
    "replicas": [
        {"replica": "replica1", **TERMS, "expected_ms": 77.5},
        {"replica": "replica2", **TERMS},
    ],
}  # fmt: skip


async def service() -> FastAPI:
    """Answers a body of ``{}`` with an error and others with :data:`ANSWER`."""
    routes = FastAPI()

    @routes.post("/v1/route/explain")
    async def answer(request: Request) -> JSONResponse:
        error = {"error": {"message": "messages: field required"}}
        return JSONResponse(ANSWER) if await request.json() else JSONResponse(error, 400)

    return routes


@pytest.fixture
def url() -> Iterator[str]:
    with http_server(service) as url:
        yield url


def explain(file: Path, url: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["route", "explain", str(file), "--url", url])
    return done.exit_code, done.output


def test_the_chosen_replica_comes_first(url: str, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"messages": []}')
    code, output = explain(file, url)
    assert code == 0
    assert "99 prompt tokens -> replica2 (fastest)" in output
    assert "the least of expected + crowding" in output
    rows = [line for line in output.splitlines() if line.strip().startswith("replica")][1:]
    assert "replica2" in rows[0]
    assert "77.5" in rows[1]


@pytest.mark.parametrize("content", ["{}", "missing file"])
def test_an_error_is_one_line(url: str, tmp_path: Path, content: str) -> None:
    file = tmp_path / "request.json"
    if content == "{}":
        file.write_text(content)
    code, output = explain(file, url)
    assert code == 2
    assert "error:" in output
    assert "Traceback" not in output


def test_no_service_is_an_error_too(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"messages": []}')
    code, output = explain(file, "http://127.0.0.1:1")
    assert code == 2
    assert "no answer" in output
