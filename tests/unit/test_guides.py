"""Every Python snippet of docs/guides runs, against a real HTTP server on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

import rakv_cluster
from rakv_cluster.config import Settings
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app

ROOT = Path(rakv_cluster.__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
HTTP_URL = "http://127.0.0.1:8000"


def snippets() -> list[tuple[str, str]]:
    found = []
    for guide in GUIDES:
        code = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
        found += [(f"{guide.stem}-{index}", text) for index, text in enumerate(code)]
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    def build() -> FastAPI:
        backend = ScriptedBackend(lambda prompt: "An answer.")
        return scripted_app(backend, Settings(), ManualClock())

    with http_server(build) as url:
        yield url


@pytest.mark.parametrize(("name", "code"), snippets(), ids=lambda value: value.split("\n")[0][:40])
def test_the_snippet_runs(name: str, code: str, url: str) -> None:
    assert HTTP_URL in code, "a snippet that asks no service is not worth a test of its own"

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code.replace(HTTP_URL, url)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "An answer." in done.stdout


def test_there_are_snippets() -> None:
    assert len(snippets()) >= 2
