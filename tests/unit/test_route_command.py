"""``rakv route explain``: what it prints, and one clear line where it cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from rakv_cluster.cli.main import app

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


class Service(BaseHTTPRequestHandler):
    """Answers a body of ``{}`` with an error and others with :data:`ANSWER`."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        error = {"error": {"message": "messages: field required"}}
        self.send_response(200 if asked else 400)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER if asked else error).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def explain(file: Path, url: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["route", "explain", str(file), "--url", url])
    return done.exit_code, done.output


def test_the_chosen_replica_comes_first(url: str, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"messages": []}')
    code, output = explain(file, url)
    assert code == 0
    assert "99 prompt tokens -> replica2 (fastest)" in output
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
