"""A full disk, a read-only disk, a full map: writes are refused, reads go on, nothing is raised.

The first two need a mount of their own, made inside a mount namespace (``unshare -m``) so that it
goes away with the process; the tests run as root, for whom file modes would not count.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from rakv_cluster.clock import SystemClock
from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.codec import encode
from rakv_cluster.store.generation import SEGMENT_BYTES
from rakv_cluster.store.lmdb_shard import ShardReader, ShardSettings, ShardWriter, WriterSource
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import tiny_record
from rakv_cluster.testing.shard_processes import LAYOUT, TOKENS, count_loads

RECORD_BYTES = tiny_record(0, TOKENS, LAYOUT).kv.nbytes

COMMON = """
import json, sys
from rakv_cluster.kv.codec import encode
from rakv_cluster.store.lmdb_shard import *
from rakv_cluster.store.lmdb_shard import WriterSource
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import tiny_record
from rakv_cluster.testing.shard_processes import LAYOUT, TOKENS, count_loads
folder = sys.argv[1]
record = lambda n: tiny_record(n, TOKENS, LAYOUT)
"""

FILL = """
writer = ShardWriter(folder, ShardSettings(64 << 20), ManualClock())
reader = ShardReader(WriterSource(writer))
wrong = present = late = 0
for n in range(150):
    result = writer.commit([encode(record(n))])
    late += n >= 100 and len(result.stored)
    loaded, missed, bad = count_loads(reader, range(max(0, n - 5), n + 1))
    wrong += bad
present = len(writer.keys())
intact = count_loads(reader, range(150))
counters = dict(writer.stats().counters)
writer.close()
writer = ShardWriter(folder, ShardSettings(64 << 20), ManualClock())
again = count_loads(ShardReader(WriterSource(writer)), range(150))
writer.close()
print(json.dumps(dict(wrong=wrong, present=present, intact=intact, again=again, late=late,
                      counters=counters)))
"""

READ_ONLY = """
reader_sees = count_loads(ShardReader(folder), range(5))
store = open_store(folder, ShardSettings(16 << 20), ManualClock())
taken = store.put([record(7)])
print(json.dumps(dict(reader=reader_sees, taken=taken, counters=dict(store.stats().counters))))
"""


def in_mount(mount: str, folder: Path, script: str) -> dict:
    """Run a script with ``folder`` mounted as ``mount`` says, in a namespace of its own."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-m", "true"], check=False).returncode:
        pytest.skip("needs the right to mount")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", f'{mount}; exec "$@"', "sh",
         sys.executable, "-c", COMMON + script, str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_refuses_writes_and_keeps_what_it_has(tmp_path):
    outcome = in_mount(f"mount -t tmpfs -o size=6m tmpfs {tmp_path}", tmp_path, FILL)

    loaded, _, wrong = outcome["intact"]
    assert outcome["wrong"] == wrong == 0
    assert loaded == outcome["present"] >= 6e6 * 0.3 / RECORD_BYTES
    assert outcome["again"] == outcome["intact"]
    assert outcome["counters"]["disk_write_retries"] > 0
    assert outcome["counters"]["disk_evictions"] > 0
    assert outcome["late"] > 25, "after making room it takes new records again"


def test_a_read_only_disk_serves_nothing_new(tmp_path):
    folder = tmp_path / "shard"
    writer = ShardWriter(folder, ShardSettings(16 << 20), SystemClock())
    writer.commit([encode(tiny_record(n, TOKENS, LAYOUT)) for n in range(5)])
    writer.close()

    outcome = in_mount(
        f"mount --bind {folder} {folder}; mount -o remount,ro,bind {folder}", folder, READ_ONLY
    )

    assert outcome["reader"][2] == 0
    assert outcome["taken"] == 0
    assert outcome["counters"] == {"store_unavailable": 1}


def test_a_reader_that_never_ends_fills_the_map_but_fails_nothing(tmp_path):
    """Pages that an old reader still sees cannot be used again: the map fills up."""
    budget = 4 << 20
    writer = ShardWriter(tmp_path, ShardSettings(budget), ManualClock())
    reader = ShardReader(WriterSource(writer))
    writer.commit([encode(tiny_record(0, TOKENS, LAYOUT))])
    stuck = writer.generation.env.begin()
    refused = 0
    for number in range(1, 500):
        result = writer.commit([encode(tiny_record(number, TOKENS, LAYOUT))])
        refused += result.refused
    assert refused > 0
    assert count_loads(reader, range(500))[2] == 0
    assert writer.stats().stored_bytes <= budget

    stuck.abort()
    results = [
        writer.commit([encode(tiny_record(number, TOKENS, LAYOUT))]) for number in range(600, 700)
    ]

    assert [result.refused for result in results[5:]] == [0] * 95
    assert count_loads(reader, range(690, 700)) == (10, 0, 0)
    writer.close()


def test_a_reserve_that_cannot_be_given_back_refuses_writes(tmp_path):
    writer = ShardWriter(tmp_path, ShardSettings(4 << 20), ManualClock())
    writer.commit([encode(tiny_record(0, TOKENS, LAYOUT))])
    reserve = writer.generation.path / "ballast"
    reserve.unlink()
    reserve.mkdir()  # unlink fails, as on a disk that has become read-only
    stuck = writer.generation.env.begin()

    refused = sum(
        writer.commit([encode(tiny_record(number, TOKENS, LAYOUT))]).refused
        for number in range(1, 500)
    )

    assert refused > 0
    stuck.abort()
    writer.close()


class FailingWrites:
    """An environment whose next ``failures`` write transactions fail as on a full disk."""

    def __init__(self, env: Any, failures: int) -> None:
        self._env = env
        self._failures = failures

    def begin(self, **options: Any) -> Any:
        if options.get("write") and self._failures:
            self._failures -= 1
            raise lmdb.DiskError("no space left on device")
        return self._env.begin(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def test_a_disk_that_recovers_between_two_attempts_keeps_the_budget(tmp_path):
    writer = ShardWriter(tmp_path, ShardSettings(5 * RECORD_BYTES), ManualClock())
    stored = 0
    while not writer.commit([encode(tiny_record(stored, TOKENS, LAYOUT))]).evicted:
        stored += 1
    writer.generation.env = FailingWrites(writer.generation.env, failures=2)

    result = writer.commit([encode(tiny_record(99, TOKENS, LAYOUT))])

    assert result.stored == (tiny_record(99).key,)
    assert len(result.evicted) == 1
    stats = writer.stats()
    assert stats.stored_bytes <= stats.budget_bytes
    assert stats.records == len(writer.keys()) == stored
    writer.close()


def test_a_disk_that_recovers_between_two_attempts_replaces_a_tail_once(tmp_path):
    writer = ShardWriter(tmp_path, ShardSettings(16 << 20), ManualClock())
    reader = ShardReader(WriterSource(writer))
    writer.commit([encode(tiny_record(0, 20, LAYOUT))])
    longer = encode(tiny_record(0, TOKENS, LAYOUT))
    writer.generation.env = FailingWrites(writer.generation.env, failures=2)

    result = writer.commit([longer])

    assert result.stored == (longer.key,)
    assert count_loads(reader, range(1)) == (1, 0, 0)
    once = writer.stats().stored_bytes
    writer.close()
    writer = ShardWriter(tmp_path, ShardSettings(16 << 20), ManualClock())
    assert (writer.stats().records, writer.stats().stored_bytes) == (1, once)
    with writer.generation.env.begin() as txn:
        segments = txn.stat(writer.generation.bodies)["entries"]
    assert segments == -(-len(longer.body) // SEGMENT_BYTES)
    writer.close()


def open_files(folder: Path) -> list[str]:
    """What this process has open below ``folder``, removed files included."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them is closed by now
            targets.append(str(entry.readlink()))
    return sorted(target for target in targets if target.startswith(str(folder)))


def test_a_generation_that_cannot_take_over_gives_its_disk_back(tmp_path):
    writer = ShardWriter(tmp_path, ShardSettings(16 << 20), ManualClock())
    writer.commit([encode(tiny_record(0))])
    before = open_files(tmp_path)
    obstacle = tmp_path / "CURRENT.new"  # where the name of the next one is written first
    obstacle.mkdir()

    with pytest.raises(StoreUnavailable):
        writer.compact()

    assert open_files(tmp_path) == before
    obstacle.rmdir()
    assert writer.compact().records == 1
    writer.close()


def test_a_record_larger_than_a_quarter_of_the_budget_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, ShardSettings(3 * RECORD_BYTES), ManualClock())

    result = writer.commit([encode(tiny_record(0, TOKENS, LAYOUT)), encode(tiny_record(1))])

    assert result.stored == (tiny_record(1).key,)
    assert result.refused == 1
    assert writer.stats().counters["disk_refused_large"] == 1
    writer.close()


def test_a_damaged_record_is_not_taken(tmp_path):
    good = encode(tiny_record(0, TOKENS, LAYOUT))
    body = np.frombuffer(good.body, np.uint8).copy()
    body[-1] ^= 1
    bad = type(good)(good.key, good.head, body.tobytes())
    writer = ShardWriter(tmp_path, ShardSettings(16 << 20), ManualClock())

    result = writer.commit([bad])

    assert (result.stored, result.refused) == ((), 1)
    assert writer.stats().counters["disk_refused_damaged"] == 1
    writer.close()
