"""The generated code that is checked in is what scripts/protos makes of protos/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GENERATED = ROOT / "rakv_cluster" / "rpc" / "v1"


def test_regenerating_gives_the_same(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts" / "protos", tmp_path],
        env=os.environ | {"PYTHON": sys.executable}, check=True, timeout=300,
    )  # fmt: skip

    made = {path.name: path.read_text() for path in tmp_path.iterdir()}

    checked_in = {path.name: path.read_text() for path in GENERATED.glob("*_pb2.py*")}
    assert made == checked_in
