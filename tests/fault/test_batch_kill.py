"""``rakv batch`` killed with SIGKILL again and again: the output is as if it had not been."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest
from fastapi import FastAPI

from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app
from rakv_cluster.testing.waiting import eventually

DOCUMENTS, PROMPTS, WINDOW, KILLS = 4, 8, 3, 5
ROWS = DOCUMENTS * PROMPTS
ANSWER_S = 0.05
# Of kills: how many come while the command starts, until when, and how late those in its work.
SEED, STARTING, START_S, WORK_S = 1, 0.3, 1.0, 0.12


class Throttle(ScriptedBackend):
    """Takes a while for each answer, and after ``limit`` of them waits until :meth:`release`."""

    def __init__(self, limit: int) -> None:
        super().__init__(self.answer)
        self._limit = limit
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._released = asyncio.Event()
        self.asked = threading.Event()
        self.answered: Counter[str] = Counter()

    def release(self) -> None:
        for loop in self._loops:
            loop.call_soon_threadsafe(self._released.set)

    def answer(self, prompt: str) -> str:
        question = prompt.split("Question ")[1].split("<", maxsplit=1)[0]
        self.answered[question] += 1
        return f"Answer to {question}"

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self._loops.add(asyncio.get_running_loop())
        self.asked.set()
        await asyncio.sleep(ANSWER_S)
        if self.answered.total() >= self._limit:
            await self._released.wait()
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event


@pytest.fixture
def throttle() -> Throttle:
    # Too few to be finished before the last kill.
    return Throttle(limit=ROWS - WINDOW)


@pytest.fixture
def url(throttle: Throttle) -> Iterator[str]:
    async def build() -> FastAPI:
        return scripted_app(throttle, Settings(), ManualClock())

    with http_server(build) as url:
        yield url


def start(folder: Path, out: str, url: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rakv_cluster.cli", "batch", "run"]
    command += ["--docs", str(folder / "docs"), "--prompts", str(folder / "prompts.txt")]
    command += ["--out", str(folder / out), "--url", url, "--window", str(WINDOW), *more]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def kill_at_random(process: subprocess.Popen[bytes], throttle: Throttle, random: Random) -> None:
    """Now and then while the command starts; else at some moment of its work."""
    if random.random() < STARTING:
        threading.Event().wait(random.uniform(0, START_S))
    else:
        assert throttle.asked.wait(60), "the command asks nothing"
        threading.Event().wait(random.uniform(0, WORK_S))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def rows_done(journal: Path) -> int:
    """Whole lines behind the header."""
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def test_five_kills_at_random_moments_change_no_byte(
    throttle: Throttle, url: str, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    for index in range(DOCUMENTS):
        (tmp_path / "docs" / f"{index}.txt").write_text(f"Document {index}. " * 30)
    prompts = "\n".join(f"Question {index}" for index in range(PROMPTS))
    (tmp_path / "prompts.txt").write_text(prompts)
    journal = tmp_path / "killed.jsonl.journal"
    random = Random(SEED)

    for kill in range(KILLS):
        throttle.asked.clear()
        process = start(tmp_path, "killed.jsonl", url, *(["--resume"] if kill else []))
        if kill == KILLS - 1:
            # On a slow machine all kills so far may have come before the first answer.
            eventually(lambda: rows_done(journal) > 0, "an answer is kept", timeout_s=60.0)
        kill_at_random(process, throttle, random)
    done_before = rows_done(journal)

    throttle.release()
    assert start(tmp_path, "killed.jsonl", url, "--resume").wait(120) == 0
    asked = throttle.answered.total()
    assert start(tmp_path, "whole.jsonl", url).wait(120) == 0

    killed = (tmp_path / "killed.jsonl").read_bytes()
    assert killed == (tmp_path / "whole.jsonl").read_bytes()
    ids = [json.loads(line)["id"] for line in killed.splitlines()]
    assert len(ids) == len(set(ids)) == ROWS
    assert not journal.exists()
    assert 0 < done_before < ROWS
    # A kill costs at most what was being asked.
    assert ROWS <= asked <= ROWS + KILLS * WINDOW
