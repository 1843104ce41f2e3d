"""A batch by an engine in the command's own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.testing.service import LocalService


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in ("x", "y"):
        (tmp_path / "docs" / f"{name}.txt").write_text(f"Document {name}.\n\n" * 40)
    (tmp_path / "prompts.txt").write_text("One?\nTwo?\nThree?\nFour?")
    (tmp_path / "JOB.yaml").write_text(
        "docs: docs\nprompts: prompts.txt\nout: out.jsonl\nmax_tokens: 6\nwindow: 1\n"
    )
    return tmp_path / "JOB.yaml"


def test_it_writes_what_a_service_would_have_answered(
    job: Path, local: LocalService, tiny_folder: Path
) -> None:
    served = job.parent / "served.jsonl"
    by_service = ["batch", "run", str(job), "--url", local.url, "--out", str(served)]
    settings = {"RAKV_MODEL": str(tiny_folder), "RAKV_PRICE_LOADS": "false"}

    here = CliRunner().invoke(app, ["batch", "run", str(job), "--in-process"], env=settings)
    there = CliRunner().invoke(app, by_service)

    assert here.exit_code == there.exit_code == 0, here.output + there.output
    assert (job.parent / "out.jsonl").read_bytes() == served.read_bytes()
    lines = (job.parent / "out.jsonl.stats.jsonl").read_text().splitlines()
    stats = [json.loads(line) for line in lines]
    assert sum(s["cached_tokens"] for s in stats) > 0.4 * sum(s["prompt_tokens"] for s in stats)


def test_a_model_that_is_not_there_is_refused(job: Path) -> None:
    done = CliRunner().invoke(
        app, ["batch", "run", str(job), "--in-process"], env={"RAKV_MODEL": "/no/such/folder"}
    )

    assert done.exit_code not in {0, 1}
    assert "/no/such/folder" in done.output
