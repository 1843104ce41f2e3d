"""kill -9 of a shard's writer in mid-batch: what it acknowledged is there, and nothing is wrong."""

from __future__ import annotations

import os
import random

from rakv_cluster.clock import SystemClock
from rakv_cluster.store.lmdb_shard import ShardReader, ShardSettings, ShardWriter, WriterSource
from rakv_cluster.testing.records import tiny_record
from rakv_cluster.testing.shard_processes import (
    BATCH,
    count_loads,
    hold_writer,
    started,
    write_for_ever,
)

CRASHES = int(os.environ.get("RAKV_TEST_CRASHES", "50"))
BUDGET = 3 << 20  # some 60 records: the writer evicts
WAIT_S = 60.0


def test_no_acknowledged_record_is_lost_and_none_is_wrong(tmp_path):
    draw = random.Random(4)
    numbers = {}
    expected: set[bytes] = set()
    first = 0
    for _ in range(CRASHES):
        acknowledged = 0
        with started(write_for_ever, str(tmp_path), BUDGET, first) as (process, pipe):
            for _ in range(draw.randint(1, 12)):
                assert pipe.poll(WAIT_S)
                stored, evicted = pipe.recv()
                acknowledged += 1
                expected.update(stored)
                expected.difference_update(evicted)
            process.kill()
            process.join()
            # Batches that were acknowledged but not read yet, and at most one that was not.
            while pipe.poll(0):
                try:
                    stored, evicted = pipe.recv()
                except EOFError:
                    break
                acknowledged += 1
                expected.update(stored)
                expected.difference_update(evicted)
        # However many it got done: it goes on while this process stands still.
        last = first + BATCH * (acknowledged + 1)
        numbers |= {tiny_record(n).key: n for n in range(first, last)}
        first = last

        writer = ShardWriter(tmp_path, ShardSettings(BUDGET), SystemClock())
        reader = ShardReader(WriterSource(writer))
        stats = writer.stats()
        present = writer.keys()
        sizes = [found.stored_bytes for found in reader.find(present).values()]
        outcomes = [count_loads(reader, range(numbers[key], numbers[key] + 1)) for key in present]
        writer.close()

        assert stats.counters["quarantines"] == 0
        assert stats.stored_bytes == sum(sizes) <= BUDGET
        assert outcomes == [(1, 0, 0)] * len(present)
        # The batch in flight may have been committed without a word, evicting others.
        assert len(expected - set(present)) <= BATCH
        assert len(set(present) - expected) <= BATCH
        expected = set(present)


def test_the_lock_of_a_killed_writer_is_free_at_once(tmp_path):
    with started(hold_writer, str(tmp_path)) as (process, pipe):
        shard_id = pipe.recv()
        process.kill()
        process.join()

        writer = ShardWriter(tmp_path, ShardSettings(BUDGET), SystemClock())

        assert writer.shard_id == shard_id
        writer.close()
