"""Several processes on one folder: one writer, readers that follow it through everything."""

from __future__ import annotations

import threading

import pytest

from rakv_cluster.errors import StoreUnavailable, WriterFenced
from rakv_cluster.kv.codec import encode
from rakv_cluster.serving.stores import disk_problem
from rakv_cluster.store.folder import DATA_FILE
from rakv_cluster.store.lmdb_shard import (
    LmdbStore,
    ShardReader,
    ShardSettings,
    ShardWriter,
    WriterSource,
    open_store,
)
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import load_item, tiny_record
from rakv_cluster.testing.shard_processes import (
    LAYOUT,
    TOKENS,
    count_loads,
    hold_writer,
    read_for_ever,
    read_once_asked,
    started,
)

SETTINGS = ShardSettings(16 << 20)
NUMBERS = range(20)
WAIT_S = 60.0


def open_filled(folder) -> ShardWriter:
    writer = ShardWriter(folder, SETTINGS, ManualClock())
    writer.commit([encode(tiny_record(number, TOKENS, LAYOUT)) for number in NUMBERS])
    return writer


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path):
    with started(hold_writer, str(tmp_path)) as (process, pipe):
        assert pipe.poll(WAIT_S)
        with pytest.raises(WriterFenced, match=f"another process writes to .*: pid {process.pid}$"):
            ShardWriter(tmp_path, SETTINGS, ManualClock())
        store = open_store(tmp_path, SETTINGS, ManualClock())

        assert store.put([tiny_record(1)]) == 0
        assert store.stats().counters["store_unavailable"] == 1


def test_a_service_says_at_its_start_who_else_writes_to_its_folder(tmp_path):
    assert disk_problem(tmp_path) == ""
    with started(hold_writer, str(tmp_path / "shard")) as (process, pipe):
        assert pipe.poll(WAIT_S)
        assert disk_problem(tmp_path).endswith(f"{tmp_path / 'shard'}: pid {process.pid}")
    assert disk_problem(tmp_path) == ""


def test_a_second_writer_in_the_same_process_is_refused_too(tmp_path):
    writer = ShardWriter(tmp_path, SETTINGS, ManualClock())

    with pytest.raises(WriterFenced):
        ShardWriter(tmp_path, SETTINGS, ManualClock())

    writer.close()
    ShardWriter(tmp_path, SETTINGS, ManualClock()).close()


def test_a_reader_in_another_process_sees_each_commit(tmp_path):
    writer = open_filled(tmp_path)
    with started(read_once_asked, str(tmp_path), range(25)) as (_, pipe):
        pipe.send("load")
        assert pipe.recv() == (20, 5, 0)
        writer.commit([encode(tiny_record(number, TOKENS, LAYOUT)) for number in range(20, 25)])
        writer.delete([tiny_record(0).key])

        pipe.send("load")

        assert pipe.recv() == (24, 1, 0)
    writer.close()


def test_compaction_during_reads_in_another_process(tmp_path):
    writer = open_filled(tmp_path)
    with started(read_for_ever, str(tmp_path), NUMBERS) as (process, pipe):
        rounds = []
        for _ in range(8):
            assert pipe.poll(WAIT_S)
            rounds.append(pipe.recv())
            writer.compact()
        while rounds[-1][0] < len(NUMBERS):
            assert pipe.poll(WAIT_S)
            rounds.append(pipe.recv())

        assert all(wrong == 0 for _, _, wrong in rounds)
        assert process.is_alive()
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("gen-")]) == 1
    writer.close()


@pytest.mark.parametrize("compactions", [0, 8])
def test_a_reader_follows_what_replaced_a_damaged_environment(tmp_path, compactions):
    writer = open_filled(tmp_path)
    for _ in range(compactions):
        writer.compact()
    damaged = writer.generation
    with started(read_once_asked, str(tmp_path), NUMBERS) as (process, pipe):
        pipe.send("load")
        assert pipe.poll(WAIT_S)
        assert pipe.recv() == (len(NUMBERS), 0, 0)
        # Between reads: one that is under way when its file is cut ends its process (ADR 0021).
        with (damaged.path / DATA_FILE).open("r+b") as file:
            file.truncate(2 * 4096)
        assert writer.commit([encode(tiny_record(0, TOKENS, LAYOUT))]).refused == 1
        writer.commit([encode(tiny_record(number, TOKENS, LAYOUT)) for number in NUMBERS])
        assert writer.generation is not damaged
        assert (writer.generation.path == damaged.path) == (compactions == 0)

        pipe.send("load")

        assert pipe.poll(WAIT_S)
        assert pipe.recv() == (len(NUMBERS), 0, 0)
        assert process.is_alive()
    assert writer.stats().counters["quarantines"] == 1
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("gen-")]) == 1
    writer.close()


def test_compaction_during_reads_in_the_same_process(tmp_path):
    writer = open_filled(tmp_path)
    reader = ShardReader(WriterSource(writer))
    stop = threading.Event()
    outcomes = []

    def read():
        while not stop.is_set():
            outcomes.append(count_loads(reader, NUMBERS))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        writer.compact()
    stop.set()
    for thread in threads:
        thread.join()

    assert all(wrong == 0 for _, _, wrong in outcomes)
    assert count_loads(reader, NUMBERS) == (len(NUMBERS), 0, 0)
    writer.close()


def test_the_slot_of_a_killed_reader_is_cleared(tmp_path):
    clock = ManualClock()
    writer = ShardWriter(tmp_path, SETTINGS, clock)
    writer.commit([encode(tiny_record(number, TOKENS, LAYOUT)) for number in NUMBERS])
    with started(read_once_asked, str(tmp_path), NUMBERS) as (process, pipe):
        pipe.send("load")
        pipe.recv()
        process.kill()
        process.join()

        clock.advance(SETTINGS.check_interval_s + 1)
        writer.commit([])

    assert writer.stats().counters["stale_readers"] == 1
    writer.close()


def test_reads_after_closing_are_misses_and_writes_say_so(tmp_path):
    writer = ShardWriter(tmp_path, SETTINGS, ManualClock())
    store = LmdbStore(writer)
    record = tiny_record(1)
    store.put([record])
    store.close()
    store.close()

    assert store.find([record.key]) == {}
    assert not store.load([load_item(record)])[0].ok
    with pytest.raises(StoreUnavailable):
        writer.commit([encode(record)])
