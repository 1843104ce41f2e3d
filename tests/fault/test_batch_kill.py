"""``rakv batch`` killed with SIGKILL again and again: the output is as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from rakv_cluster.config import Settings
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app

DOCUMENTS, PROMPTS = 4, 6
ROWS = DOCUMENTS * PROMPTS


class Throttle:
    """Lets the server answer as many requests as it was given permits for."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.answered: Counter[str] = Counter()

    def allow(self, count: int) -> None:
        self._permits.release(count)

    def answer(self, prompt: str) -> str:
        if not self._permits.acquire(timeout=60):
            raise TimeoutError("no permit")
        question = prompt.split("Question ")[1].split("<", maxsplit=1)[0]
        self.answered[question] += 1
        return f"Answer to {question}"


@pytest.fixture
def throttle() -> Throttle:
    return Throttle()


@pytest.fixture
def url(throttle: Throttle) -> Iterator[str]:
    async def build() -> FastAPI:
        return scripted_app(ScriptedBackend(throttle.answer), Settings(), ManualClock())

    with http_server(build) as url:
        yield url
        throttle.allow(1000)


def start(folder: Path, out: str, url: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rakv_cluster.cli", "batch", "run"]
    command += ["--docs", str(folder / "docs"), "--prompts", str(folder / "prompts.txt")]
    command += ["--out", str(folder / out), "--url", url, "--window", "3", *more]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        threading.Event().wait(0.02)


def test_five_kills_change_no_byte(throttle: Throttle, url: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for index in range(DOCUMENTS):
        (tmp_path / "docs" / f"{index}.txt").write_text(f"Document {index}. " * 30)
    prompts = "\n".join(f"Question {index}" for index in range(PROMPTS))
    (tmp_path / "prompts.txt").write_text(prompts)
    journal = tmp_path / "killed.jsonl.journal"

    def rows() -> int:
        return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0

    for kill in range(5):
        goal = rows() + 3

        def reached(goal: int = goal) -> bool:
            throttle.allow(1)
            return rows() >= goal

        process = start(tmp_path, "killed.jsonl", url, *(["--resume"] if kill else []))
        until(reached)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    before = rows()
    assert 15 <= before < ROWS

    throttle.allow(10 * ROWS)
    assert start(tmp_path, "killed.jsonl", url, "--resume").wait(120) == 0
    assert start(tmp_path, "whole.jsonl", url).wait(120) == 0

    killed = (tmp_path / "killed.jsonl").read_bytes()
    assert killed == (tmp_path / "whole.jsonl").read_bytes()
    ids = [json.loads(line)["id"] for line in killed.splitlines()]
    assert len(ids) == len(set(ids)) == ROWS
    assert not journal.exists()
    # At most a window's worth of rows was asked twice per kill.
    assert throttle.answered.total() <= 2 * ROWS + 5 * 3
