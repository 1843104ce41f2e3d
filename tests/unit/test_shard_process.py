"""What a shard actor's process has to carry."""

from __future__ import annotations

import subprocess
import sys


def test_a_shards_process_imports_no_torch() -> None:
    """It would cost every node a few seconds of CPU and 180 MB for nothing."""
    script = (
        "import sys, rakv_cluster.cluster.ray_fleet; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
