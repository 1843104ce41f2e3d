"""A batch's memory does not grow with its answers: 100,000 rows with a fake engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS, ANSWER_BYTES = 100_000, 2_000
GROWTH_LIMIT_BYTES = 100 * 1024**2

# In a process of its own: the peak of this one's memory was reached long ago.
SCRIPT = f"""
import asyncio, json, resource, sys
from pathlib import Path

from rakv_cluster.batch.journal import Journal
from rakv_cluster.batch.output import write_results
from rakv_cluster.batch.rows import Job, read_rows
from rakv_cluster.batch.runner import run_rows
from rakv_cluster.client import Answer

folder = Path(sys.argv[1])
documents = {{f"d{{index}}": "text " * 200 for index in range(1000)}}
details = {{"cached_tokens": 0}}
usage = {{"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": details}}

async def ask(index):
    return Answer(f"{{index}} ".ljust({ANSWER_BYTES}, "x"), "stop", 0.1, 0.2, usage, {{}})

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak_bytes()
job = Job(read_rows(folder / "prompts.txt", documents), documents, "", {{}})
with Journal(folder / "journal", job.digest) as journal:
    asyncio.run(run_rows(job.plan().order, ask, journal, window=8))
    write_results(job, journal, folder / "out.jsonl")
print(json.dumps({{"rows": len(job.rows), "growth_bytes": peak_bytes() - before}}))
"""


def _fast_place() -> str | None:
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 * ROWS * ANSWER_BYTES
    return str(memory) if roomy else None


def test_100_000_rows_take_little_memory() -> None:
    # Every row is synced to the disk. In memory, where there is such a place: this is not about
    # the disk's speed.
    with tempfile.TemporaryDirectory(dir=_fast_place()) as name:
        folder = Path(name)
        (folder / "prompts.txt").write_text("\n".join(f"Question {i}?" for i in range(100)))

        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=500,
            check=True,
        )  # fmt: skip

        told = json.loads(done.stdout)
        with (folder / "out.jsonl").open() as lines:
            count = sum(
                json.loads(line)["text"].startswith(f"{i} ") for i, line in enumerate(lines)
            )

    assert told["rows"] == count == ROWS
    # All answers together are twice as much.
    assert told["growth_bytes"] < GROWTH_LIMIT_BYTES < ROWS * ANSWER_BYTES / 1.5
