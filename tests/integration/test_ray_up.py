"""deploy/ray-cluster.local.yaml and deploy/serve.yaml brought up by `ray up` on two nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rakv_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(rakv_cluster.__file__).parent.parent
NAMESPACES = ["unshare", "-n", "-m", "-p", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str:
    """What this machine lacks; empty if nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    for program in ("sshd", "ssh", "ssh-keygen", "rsync", "unshare", "mount"):
        if shutil.which(program, path=path) is None:
            return f"{program} is not installed"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        return "namespaces are not permitted"
    return ""


def test_ray_up_starts_a_service_on_two_nodes_and_ray_down_ends_it(
    tiny_folder: Path, tmp_path: Path
) -> None:
    if reason := missing():
        pytest.skip(f"{reason}; the files' shape is checked in test_deploy_files.py")
    for name in ("host_key", "key"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(key, check=True)
    shutil.copytree(tiny_folder, tmp_path / "model")
    # `ray stop` goes by this name. One runs out here, where nothing may be stopped, and one on each
    # node, which shows that it would be.
    for place in ("decoy", "sentinel"):
        (tmp_path / place).mkdir()
        shutil.copy(shutil.which("sleep") or "", tmp_path / place / "raylet")
    arena = [sys.executable, str(Path(__file__).with_name("ray_up_arena.py"))]
    with subprocess.Popen([tmp_path / "sentinel" / "raylet", "3600"]) as sentinel:
        with (tmp_path / "arena.log").open("wb") as log:
            done = subprocess.run(
                [*NAMESPACES, *arena, str(tmp_path), str(ROOT)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        survived = sentinel.poll() is None
        sentinel.kill()

    assert done.returncode == 0, (tmp_path / "arena.log").read_text()[-8000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert survived
    assert (facts["decoys_before"], facts["decoys_after_up"]) == (2, 0)
    assert facts["statuses"] == [200]
    assert len(facts["busy_replicas"]) == 2
    assert facts["raylets_after_down"] == 0
