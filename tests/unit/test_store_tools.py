"""Verification of a shard on disk, and archives of its records."""

from __future__ import annotations

import io

import pytest

from rakv_cluster.errors import CorruptRecord, StoreUnavailable
from rakv_cluster.kv.codec import encode
from rakv_cluster.store.archive import read_archive, write_archive
from rakv_cluster.store.folder import DATA_FILE, ShardFolder
from rakv_cluster.store.lmdb_shard import ShardReader, ShardSettings, ShardWriter
from rakv_cluster.store.verify import main, verify_shard
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import tiny_record

SETTINGS = ShardSettings(16 << 20)
RECORDS = [encode(tiny_record(number)) for number in range(6)]


@pytest.fixture
def shard(tmp_path):
    writer = ShardWriter(tmp_path, SETTINGS, ManualClock())
    writer.commit(RECORDS)
    writer.close()
    return tmp_path


def damage(shard) -> None:
    path = ShardFolder(shard).current() / DATA_FILE
    body = RECORDS[3].body
    spoiled = body[:5] + bytes([body[5] ^ 4]) + body[6:]
    # Everywhere: earlier transactions may have left copies on pages that are free by now.
    path.write_bytes(path.read_bytes().replace(body, spoiled))


def test_a_whole_shard_verifies(shard, capsys):
    report = verify_shard(shard)

    assert (report.records, report.damaged, report.unindexed, report.ok) == (6, (), 0, True)
    assert report.tokens == 6 * 8
    assert main([str(shard)]) == 0
    assert "6 records" in capsys.readouterr().out


def test_damage_is_named(shard):
    damage(shard)

    report = verify_shard(shard)

    assert (report.records, report.damaged, report.ok) == (5, (RECORDS[3].key,), False)
    assert main([str(shard)]) == 1


def test_the_longest_owner_that_the_service_takes_pins(shard):
    owner = "t" * 64 + "/" + "\U0001f600" * 64
    writer = ShardWriter(shard, SETTINGS, ManualClock())

    assert writer.pin([RECORDS[0].key], owner, 60.0) == [RECORDS[0].key]
    writer.close()
    writer = ShardWriter(shard, SETTINGS, ManualClock())

    assert writer.unpin([RECORDS[0].key], owner) == 1
    with pytest.raises(ValueError, match="owner"):
        writer.pin([RECORDS[0].key], "x" * 1000, 60.0)
    writer.close()


def test_a_folder_without_a_shard_cannot_be_verified(tmp_path):
    with pytest.raises(StoreUnavailable):
        verify_shard(tmp_path)
    assert main([str(tmp_path)]) == 2


def test_compaction_leaves_damaged_records_behind(shard):
    damage(shard)
    writer = ShardWriter(shard, SETTINGS, ManualClock())

    copied = writer.compact()

    assert (copied.records, copied.damaged) == (5, 1)
    assert writer.stats().records == 5
    writer.close()
    assert verify_shard(shard).ok


def test_an_archive_carries_a_shard_to_another(shard, tmp_path_factory):
    reader = ShardReader(shard)
    file = io.BytesIO()
    assert write_archive(reader.read(reader.keys()).values(), file) == 6
    reader.close()
    file.seek(0)
    other = ShardWriter(tmp_path_factory.mktemp("other"), SETTINGS, ManualClock())

    result = other.commit(list(read_archive(file)))

    assert set(result.stored) == {record.key for record in RECORDS}
    other.close()


def archive() -> bytes:
    file = io.BytesIO()
    write_archive(RECORDS, file)
    return file.getvalue()


def test_an_archive_gives_back_what_went_in():
    assert list(read_archive(io.BytesIO(archive()))) == RECORDS


@pytest.mark.parametrize("kept", [0, 3, 6, 30, 500, -12, -1])
def test_a_cut_archive_is_refused(kept):
    with pytest.raises(CorruptRecord):
        list(read_archive(io.BytesIO(archive()[:kept])))


@pytest.mark.parametrize("offset", [0, 4, 6, 12, 20, 60, 400, -10])
def test_a_damaged_archive_is_refused(offset):
    content = bytearray(archive())
    content[offset] ^= 0x40

    with pytest.raises(CorruptRecord):
        list(read_archive(io.BytesIO(bytes(content))))
