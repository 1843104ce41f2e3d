"""What ``make demo`` runs, on the real model: the newcomer's first command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.cluster
@pytest.mark.model
def test_the_demo_shows_reuse_from_ram_and_disk_and_equal_texts(default_model_path: Path) -> None:
    command = [sys.executable, "-m", "rakv_cluster.cli", "demo", "--model", str(default_model_path)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        label: next(line for line in done.stdout.splitlines() if line.strip().startswith(label))
        for label in ("empty cache", "same documents", "after a restart")
    }
    cells = {label: row.strip().removeprefix(label).split() for label, row in rows.items()}
    prompt, ram, disk, same = 3, 4, 5, -1
    assert cells["empty cache"][ram : disk + 1] == ["0", "0"]
    assert int(cells["same documents"][ram]) > 0.9 * int(cells["same documents"][prompt])
    assert int(cells["after a restart"][disk]) > 0.9 * int(cells["after a restart"][prompt])
    assert [row[same] for row in cells.values()] == ["yes"] * 3
