"""The shell lines of the guides that a newcomer walks through, run as they stand.

`rakv serve` would start Ray: of such a line the options are checked, by `rakv settings`, which
reads them the same way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI

import rakv_cluster
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.serving.admin_api import add_cache_routes
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

ROOT = Path(rakv_cluster.__file__).parent.parent
GUIDES = ("access", "batch", "cache", "grpc")

RAKV = """#!{python}
import os, sys
from rakv_cluster.cli.main import app
words = sys.argv[1:]
if words[:1] == ["serve"]:
    pairs = []
    for flag, value in zip(words[1::2], words[2::2]):
        pairs += ["--set", value if flag == "--set" else f"{{flag.lstrip('-')}}={{value}}"]
    words = ["settings", *pairs]
elif words[:2] == ["batch", "run"]:
    words += ["--url", os.environ["URL"]]
app(words)
"""


def shell_blocks(guide: str) -> str:
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    return "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL))


def commands(guide: str) -> Iterator[str]:
    """Whole commands: lines that end in a backslash go on, assignments go with what follows."""
    joined = shell_blocks(guide).replace("\\\n", " ")
    assignments = ""
    for line in joined.splitlines():
        if re.match(r"\w+=", line):
            assignments += f"{line}\n"
        elif line.strip():
            yield assignments + line


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    async def application() -> FastAPI:
        settings, metrics = Settings(), ServiceMetrics()
        service = scripted_service(ScriptedBackend(), settings, ManualClock())
        shards = SimulatedShards([], ManualClock(), np.random.default_rng(0))
        app = create_app(service, metrics)
        admin = StoreAdmin(shards, tuple, ManualClock())
        add_cache_routes(app, CacheApi(service, metrics, admin), settings)
        return app

    with http_server(application) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the guides speak of: manuals, questions, and `rakv` on the path."""
    (tmp_path / "manuals").mkdir()
    (tmp_path / "manuals" / "tool.txt").write_text("The tool has three switches. " * 20)
    (tmp_path / "questions.txt").write_text("How many switches?\nWhat for?")
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "rakv"
    shim.write_text(RAKV.format(python=sys.executable))
    shim.chmod(shim.stat().st_mode | stat.S_IEXEC)
    return tmp_path


def run(command: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "URL": url, "KEY": "any"}
    return subprocess.run(
        ["sh", "-ec", command], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("guide", GUIDES)
def test_the_lines_run_in_their_order(guide: str, folder: Path, url: str) -> None:
    ran = 0
    for command in commands(guide):
        if "curl" in command and not shutil.which("curl"):
            continue
        done = run(command, folder, url)
        if "--resume" in command:
            # It was not killed: the line before has done all there was to do.
            assert (done.returncode, "nothing to resume" in done.stderr) == (2, True), done.stderr
        else:
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert '"error"' not in done.stdout
        ran += 1

    assert ran or not shutil.which("curl")


def test_the_walk_left_what_the_guides_promise(folder: Path, url: str) -> None:
    for command in commands("batch"):
        run(command, folder, url)
    for command in commands("access"):
        run(command, folder, url)

    assert {"answers.jsonl", "answers.jsonl.stats.jsonl", "keys.yaml"} <= {
        path.name for path in folder.iterdir()
    }


def test_the_prompt_that_the_batch_guide_shows_is_asked(folder: Path, url: str) -> None:
    guide = (ROOT / "docs" / "guides" / "batch.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", guide, flags=re.DOTALL)
    prompt = json.loads(shown)
    for name in prompt["documents"]:
        (folder / "manuals" / name).parent.mkdir()
        (folder / "manuals" / name).write_text(f"# {name}\n")
    (folder / "prompts.jsonl").write_text(shown)

    done = run(
        "rakv batch run --docs manuals --prompts prompts.jsonl --out named.jsonl", folder, url
    )

    assert done.returncode == 0, done.stderr
    row = json.loads((folder / "named.jsonl").read_text())
    assert (row["id"], row["documents"], row["error"]) == (prompt["id"], prompt["documents"], "")
