"""Processes for crash tests of a shard: targets to start, feed through a pipe, and kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import numpy as np

from rakv_cluster.clock import SystemClock
from rakv_cluster.kv.codec import encode
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.store.base import LoadItem
from rakv_cluster.store.shard_reader import FollowedFolder, ShardReader
from rakv_cluster.store.shard_writer import ShardSettings, ShardWriter
from rakv_cluster.testing.records import tiny_record

LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")
TOKENS = 40
BATCH = 4


@contextmanager
def started(
    target: Callable[..., None], *arguments: Any
) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Run ``target(pipe, *arguments)`` in a process of its own; it is killed at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def write_for_ever(pipe: Connection, folder: str, budget_bytes: int, first: int) -> None:
    """Commit records ``first, first + 1, ...``, :data:`BATCH` at a time; sends (stored, evicted)
    after each batch."""
    writer = ShardWriter(folder, ShardSettings(budget_bytes), SystemClock())
    number = first
    while True:
        batch = [encode(tiny_record(n, TOKENS, LAYOUT)) for n in range(number, number + BATCH)]
        result = writer.commit(batch)
        pipe.send((result.stored, result.evicted))
        number += BATCH


def read_for_ever(pipe: Connection, folder: str, numbers: range) -> None:
    """Load records again and again; sends (loaded, missed, wrong) after each round."""
    reader = ShardReader(folder)
    while True:
        pipe.send(count_loads(reader, numbers))


def read_once_asked(pipe: Connection, folder: str, numbers: range) -> None:
    """Load records whenever something arrives; sends (loaded, missed, wrong)."""
    reader = ShardReader(folder)
    while True:
        pipe.recv()
        pipe.send(count_loads(reader, numbers))


def read_behind_a_cut(pipe: Connection, folder: str) -> None:
    """Open the live environment, say so, and on a word read all of it without looking first."""
    with FollowedFolder(folder).lease() as generation:
        pipe.send("open")
        pipe.recv()
        with generation.env.begin(buffers=True) as txn:
            total = sum(
                int(np.frombuffer(value, np.uint8).sum(dtype=np.int64))
                for _, value in txn.cursor(db=generation.bodies)
            )
    pipe.send(total)


def hold_writer(pipe: Connection, folder: str) -> None:
    """Be the folder's writer until killed; sends once that is so."""
    writer = ShardWriter(folder, ShardSettings(16 << 20), SystemClock())
    pipe.send(writer.shard_id)
    pipe.recv()


def count_loads(reader: ShardReader, numbers: range) -> tuple[int, int, int]:
    """Load records by number: how many came back right, not at all, and with other bits."""
    loaded = missed = wrong = 0
    for number in numbers:
        record = tiny_record(number, TOKENS, LAYOUT)
        out = np.bitwise_not(record.kv)
        (outcome,) = reader.load([LoadItem(record.key, record.token_ids, LAYOUT, out)])
        if not outcome.ok:
            missed += 1
        elif (out == record.kv).all():
            loaded += 1
        else:
            wrong += 1
    return loaded, missed, wrong
