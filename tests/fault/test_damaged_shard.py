"""Damaged files: flipped bits, cut files, garbage. Each ends in misses, never in wrong bytes."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.codec import encode, parse_head
from rakv_cluster.store.base import LoadItem
from rakv_cluster.store.folder import DATA_FILE, ShardFolder
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
    read_behind_a_cut,
    read_once_asked,
    started,
)

SETTINGS = ShardSettings(16 << 20)
NUMBERS = range(12)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A closed shard with a dozen records; tests work on copies."""
    folder = tmp_path_factory.mktemp("whole") / "shard"
    writer = ShardWriter(folder, SETTINGS, ManualClock())
    for number in NUMBERS:
        writer.commit([encode(tiny_record(number, TOKENS, LAYOUT))])
    writer.close()
    return folder


@pytest.fixture
def shard(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "shard"))


def data_file(shard: Path) -> Path:
    current = ShardFolder(shard).current()
    assert current is not None
    return current / DATA_FILE


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def flip_in_copies(path: Path, needle: bytes, offset: int, bit: int) -> None:
    """Flip a bit behind each occurrence: LMDB leaves stale copies of the pages it rewrites."""
    content = path.read_bytes()
    start = content.index(needle)
    while start >= 0:
        flip(path, start + offset, bit)
        start = content.find(needle, start + 1)


def write_and_check(shard: Path) -> dict[str, int]:
    """Open a shard as its writer, load everything, write and read something new; counters."""
    writer = ShardWriter(shard, SETTINGS, ManualClock())
    store = LmdbStore(writer)
    reader = ShardReader(WriterSource(writer))
    assert count_loads(reader, NUMBERS)[2] == 0
    fresh = tiny_record(99, TOKENS, LAYOUT)
    assert store.put([fresh]) == 1
    item = load_item(fresh)
    assert store.load([item])[0].ok
    np.testing.assert_array_equal(item.out, fresh.kv)
    counters = dict(store.stats().counters)
    store.close()
    return counters


REGIONS = (
    "magic", "version", "shape", "key", "token ids", "frame table", "head checksum",
    "compressed plane", "raw plane", "frame length", "last byte",
)  # fmt: skip


def region_offset(name: str) -> tuple[bytes, int]:
    """Bytes that stand in the data file, and where the region lies from their start on."""
    encoded = encode(tiny_record(5, TOKENS, LAYOUT))
    head = parse_head(encoded.head)
    fixed = len(encoded.head) - 8 - 12 * LAYOUT.layers - 4 * TOKENS - len("test")
    in_head = {
        "magic": 0, "version": 4, "shape": 8, "key": fixed - 40,
        "token ids": fixed + len("test") + 5, "frame table": len(encoded.head) - 8 - 12,
        "head checksum": len(encoded.head) - 3,
    }  # fmt: skip
    if name in in_head:
        return encoded.head, in_head[name]
    frame = head.frames[0]
    in_body = {
        "frame length": 1, "compressed plane": 40, "raw plane": frame.length - 100,
        "last byte": frame.length - 1,
    }  # fmt: skip
    return encoded.body[: frame.length], in_body[name]


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_is_a_miss_and_the_record_goes(shard, region):
    needle, offset = region_offset(region)
    pristine = data_file(shard).read_bytes()
    for bit in (0, 3, 7):
        flip_in_copies(data_file(shard), needle, offset, bit)
        writer = ShardWriter(shard, SETTINGS, ManualClock())
        reader = ShardReader(WriterSource(writer))

        outcome = count_loads(reader, NUMBERS)

        assert outcome == (len(NUMBERS) - 1, 1, 0)
        assert reader.counters()["disk_corrupt"] == 1
        assert reader.take_report().damaged == (tiny_record(5).key,)
        writer.close()
        data_file(shard).write_bytes(pristine)

    assert count_loads_of_store(shard) == (len(NUMBERS), 0, 0)


def count_loads_of_store(shard: Path) -> tuple[int, int, int]:
    reader = ShardReader(shard)
    outcome = count_loads(reader, NUMBERS)
    reader.close()
    return outcome


def test_a_damaged_record_is_dropped_and_can_be_stored_again(shard):
    needle, offset = region_offset("raw plane")
    flip_in_copies(data_file(shard), needle, offset, 3)
    store = LmdbStore(ShardWriter(shard, SETTINGS, ManualClock()))
    record = tiny_record(5, TOKENS, LAYOUT)

    first = store.load([load_item(record)])
    records = store.stats().records  # runs after the removal: the writer works in order
    taken = store.put([record])
    again = store.load([load_item(record)])

    assert (first[0].ok, records, taken, again[0].ok) == (False, len(NUMBERS) - 1, 1, True)
    store.close()


def test_bits_flipped_anywhere_never_give_wrong_bytes(shard, tmp_path):
    """Also in LMDB's own pages, where the damage may cost more than one record."""
    draw = random.Random(11)
    with started(read_once_asked, str(shard), NUMBERS) as (_, pipe):
        size = data_file(shard).stat().st_size
        for _ in range(150):
            offset, bit = draw.randrange(2 * 4096, size), draw.randrange(8)
            flip(data_file(shard), offset, bit)
            pipe.send("load")
            assert pipe.poll(WAIT_S), f"reader died of bit {bit} at {offset}"
            loaded, missed, wrong = pipe.recv()
            assert (loaded + missed, wrong) == (len(NUMBERS), 0)
            flip(data_file(shard), offset, bit)


def cut_offsets(size: int) -> list[int]:
    draw = random.Random(5)
    edges = [0, 1, 4095, 4096, 8191, 8192, 8193, size // 2, size - 4096, size - 1]
    return edges + [draw.randrange(size) for _ in range(10)]


def test_a_file_cut_anywhere_is_never_mapped(whole, tmp_path):
    size = data_file(whole).stat().st_size
    for number, offset in enumerate(cut_offsets(size)):
        shard = Path(shutil.copytree(whole, tmp_path / str(number)))
        os.truncate(data_file(shard), offset)

        before = count_loads_of_store(shard)
        counters = write_and_check(shard)
        after = count_loads_of_store(shard)

        assert before == after == (0, len(NUMBERS), 0)
        assert counters["quarantines"] == 1
        assert (shard / "quarantine").is_dir()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", random.Random(1).randbytes(100_000), bytes(100_000)],
    ids=["empty", "text", "noise", "zeros"],
)
def test_garbage_is_moved_aside(shard, content, caplog):
    data_file(shard).write_bytes(content)

    counters = write_and_check(shard)

    assert counters["quarantines"] == 1
    assert len([r for r in caplog.records if "moved to" in r.getMessage()]) == 1


@pytest.mark.parametrize("pages", [(0,), (1,), (0, 1)])
def test_a_meta_page_that_is_none_is_moved_aside(shard, pages):
    for page in pages:
        flip(data_file(shard), page * 4096 + 16, 0)

    assert write_and_check(shard)["quarantines"] == 1


def test_quarantine_keeps_one_environment(shard):
    for _ in range(3):
        data_file(shard).write_bytes(b"garbage")
        write_and_check(shard)

    assert len(list((shard / "quarantine").iterdir())) == 1


def test_a_shard_that_cannot_be_replaced_refuses_until_it_is_opened_again(shard):
    writer = ShardWriter(shard, SETTINGS, ManualClock())
    in_the_way = shard / "quarantine"
    in_the_way.write_text("no folder")
    os.truncate(data_file(shard), 3 * 4096)

    refused = [writer.commit([encode(tiny_record(50, TOKENS, LAYOUT))]).refused for _ in range(3)]

    assert refused == [1, 1, 1]
    assert writer.keys() == []
    writer.sync()
    writer.close()
    in_the_way.unlink()
    assert write_and_check(shard)["quarantines"] == 1


@pytest.mark.parametrize("pointer", ["", "gen-000099\n", "../../etc\n", "nonsense\n"])
def test_a_pointer_to_nowhere_starts_a_fresh_generation(shard, pointer):
    (shard / "CURRENT").write_text(pointer)

    assert count_loads_of_store(shard) == (0, len(NUMBERS), 0)
    assert write_and_check(shard)["quarantines"] == 0


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[]", b'{"shard_id": 7}'])
def test_a_damaged_identity_is_made_anew_and_costs_no_record(shard, content):
    (shard / "shard.json").write_bytes(content)

    assert count_loads_of_store(shard) == (len(NUMBERS), 0, 0)
    assert write_and_check(shard)["quarantines"] == 0


def test_a_folder_full_of_garbage_is_used_all_the_same(shard):
    for name in ("shard.json", "CURRENT", "OPEN", "writer.lock", "gen-000001/data.mdb"):
        (shard / name).write_bytes(random.Random(0).randbytes(5000))

    assert count_loads_of_store(shard) == (0, len(NUMBERS), 0)
    write_and_check(shard)


def test_a_shard_of_a_newer_format_is_left_alone(shard):
    identity = shard / "shard.json"
    identity.write_text(identity.read_text().replace('"format": 1', '"format": 2'))

    with pytest.raises(StoreUnavailable, match="unknown format 2"):
        ShardWriter(shard, SETTINGS, ManualClock())

    assert data_file(shard).exists()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_used_gives_a_store_that_takes_nothing(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    record = tiny_record(1)

    store = open_store(tmp_path / where, SETTINGS, ManualClock())

    assert store.put([record]) == 0
    assert not store.load([load_item(record)])[0].ok
    assert store.find([record.key]) == {}
    assert store.stats().counters["store_unavailable"] == 1
    store.close()


def test_a_reader_of_nothing_finds_nothing(tmp_path):
    record = tiny_record(1)
    reader = ShardReader(tmp_path / "not there")

    assert reader.find([record.key]) == {}
    assert not reader.load([load_item(record)])[0].ok
    assert reader.keys() == []
    assert reader.read([record.key]) == {}
    reader.close()


def test_a_cut_under_an_open_reader_is_seen_before_reading(shard):
    with started(read_once_asked, str(shard), NUMBERS) as (process, pipe):
        pipe.send("load")
        assert pipe.recv() == (len(NUMBERS), 0, 0)
        os.truncate(data_file(shard), 3 * 4096)

        pipe.send("load")

        assert pipe.poll(WAIT_S)
        assert pipe.recv() == (0, len(NUMBERS), 0)
        assert process.is_alive()


def test_a_cut_in_the_middle_of_a_read_kills_only_the_reader(shard):
    """ADR 0021: what remains of LMDB 0.9's SIGBUS, and that it stays in one process."""
    writer = ShardWriter(shard, SETTINGS, ManualClock())
    with started(read_behind_a_cut, str(shard)) as (process, pipe):
        assert pipe.recv() == "open"
        os.truncate(data_file(shard), 3 * 4096)
        pipe.send("read")
        process.join(WAIT_S)

        refused = writer.commit([encode(tiny_record(50, TOKENS, LAYOUT))])
        taken = writer.commit([encode(tiny_record(50, TOKENS, LAYOUT))])

        assert process.exitcode == -7
        assert (refused.refused, len(taken.stored)) == (1, 1)
        assert writer.stats().counters["quarantines"] == 1
    writer.close()


def test_after_a_power_failure_a_sound_shard_is_verified_and_kept(shard):
    (shard / "OPEN").write_text("another boot")

    counters = write_and_check(shard)

    assert counters["quarantines"] == 0
    assert not (shard / "OPEN").exists()


def test_after_a_power_failure_lost_pages_are_found_before_mapping(shard):
    """Pages of the tables that never reached the disk read as zeros or as older content."""
    (shard / "OPEN").write_text("another boot")
    needle = encode(tiny_record(5, TOKENS, LAYOUT)).head
    content = bytearray(data_file(shard).read_bytes())
    while (start := content.find(needle)) >= 0:
        page = start // 4096 * 4096
        content[page : page + 4096] = bytes(4096)
    data_file(shard).write_bytes(content)

    counters = write_and_check(shard)

    assert counters["quarantines"] == 1


def test_items_of_another_layout_are_a_miss(shard):
    record = tiny_record(5, TOKENS, LAYOUT)
    other = tiny_record(5)
    reader = ShardReader(shard)

    (outcome,) = reader.load([LoadItem(record.key, other.token_ids, other.layout, other.kv)])

    assert not outcome.ok
    reader.close()
