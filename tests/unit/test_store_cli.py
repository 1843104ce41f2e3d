"""``rakv store``: an operator's commands on a shard's folder."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import rakv_cluster
from rakv_cluster.cli.main import app
from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.codec import encode
from rakv_cluster.store.folder import DATA_FILE, FOLDER_FORMAT, ShardFolder
from rakv_cluster.store.lmdb_shard import ShardReader, ShardSettings, ShardWriter
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import TINY_NAMESPACE, tiny_record

CLI = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
GUIDE = Path(rakv_cluster.__file__).parent.parent / "docs" / "guides" / "store.md"
SETTINGS = ShardSettings(16 << 20)
RECORDS = [encode(tiny_record(number)) for number in range(6)]
KEYS = {record.key for record in RECORDS}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    folder = tmp_path / "shard"
    writer = ShardWriter(folder, SETTINGS, ManualClock())
    writer.commit(RECORDS)
    writer.close()
    return folder


@pytest.fixture
def served(shard: Path) -> Iterator[Path]:
    """A shard that a service has open; LMDB would not open it twice in one process."""
    lock = ShardFolder(shard).lock()
    yield shard
    lock.release()


def store(*arguments: object) -> Result:
    return CLI.invoke(app, ["store", *map(str, arguments)])


def data_file(shard: Path) -> Path:
    current = ShardFolder(shard).current()
    assert current is not None
    return current / DATA_FILE


def damage_one(shard: Path) -> None:
    body = RECORDS[3].body
    spoiled = body[:5] + bytes([body[5] ^ 4]) + body[6:]
    # Everywhere: earlier transactions may have left copies on pages that are free by now.
    data_file(shard).write_bytes(data_file(shard).read_bytes().replace(body, spoiled))


def stored_keys(shard: Path) -> set[bytes]:
    reader = ShardReader(shard)
    keys = set(reader.keys())
    reader.close()
    return keys


def test_the_commands_of_the_guide_run(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    (block,) = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    lines = block.replace("$SHARD", str(shard)).replace("$OTHER", str(other)).splitlines()

    results = [CLI.invoke(app, shlex.split(line)[1:]) for line in lines]

    assert [(result.exit_code, result.stderr) for result in results] == [(0, "")] * 6
    assert stored_keys(other) == KEYS
    assert stored_keys(shard) == set()


def test_stats_counts_what_is_there_beside_a_live_writer(shard: Path) -> None:
    writer = ShardWriter(shard, SETTINGS, ManualClock())
    writer.pin([RECORDS[0].key], "someone", ttl_s=60.0)

    done = subprocess.run(
        [sys.executable, "-m", "rakv_cluster.cli", "store", "stats", str(shard)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    writer.close()
    assert done.stderr == ""
    assert "6 records of 48 tokens, 1 pinned" in done.stdout
    assert TINY_NAMESPACE.hex()[:16] in done.stdout


def test_verify_names_what_is_damaged(shard: Path) -> None:
    damage_one(shard)

    result = store("verify", shard)

    assert result.exit_code == 1
    assert "5 records" in result.output
    assert f"damaged: {RECORDS[3].key.hex()}" in result.output


def test_compaction_keeps_what_is_intact_and_the_budget(shard: Path) -> None:
    damage_one(shard)
    before = store("stats", shard).output

    result = store("compact", shard)

    assert "5 records kept, 1 damaged left out" in result.output
    assert stored_keys(shard) == KEYS - {RECORDS[3].key}
    budget = re.compile(r"of (\S+) used")
    assert budget.findall(store("stats", shard).output) == budget.findall(before)


def test_an_export_leaves_damage_out_and_can_be_imported(shard: Path, tmp_path: Path) -> None:
    damage_one(shard)
    archive, other = tmp_path / "a.rkva", tmp_path / "other"

    exported = store("export", shard, archive)
    first = store("import", other, archive, "--budget", "16MiB")
    second = store("import", other, archive)

    assert "5 records exported, 1 damaged left out" in exported.output
    assert "5 records imported, 0 were there, 0 refused" in first.output
    assert "0 records imported, 5 were there" in second.output
    assert stored_keys(other) == KEYS - {RECORDS[3].key}


def test_an_import_keeps_the_records_before_the_damage(shard: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "a.rkva", tmp_path / "other"
    store("export", shard, archive)
    archive.write_bytes(archive.read_bytes()[:-4])

    result = store("import", other, archive)

    assert result.exit_code == 2
    assert "archive ends early" in result.stderr
    assert stored_keys(other) <= KEYS


def test_clear_asks_first(shard: Path) -> None:
    refused = CLI.invoke(app, ["store", "clear", str(shard)], input="n\n")

    assert refused.exit_code == 1
    assert "Remove 6 records" in refused.output
    assert stored_keys(shard) == KEYS


@pytest.mark.parametrize("command", ["compact", "import", "clear"])
def test_what_writes_refuses_beside_a_service(command: str, served: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.rkva"
    store("export", served, archive)
    arguments: dict[str, list[object]] = {"import": [archive], "clear": ["--yes"]}

    result = store(command, served, *arguments.get(command, []))

    assert result.exit_code == 2
    assert result.stderr.startswith("error: another process writes to")
    assert stored_keys(served) == KEYS


@pytest.mark.parametrize("command", ["stats", "verify", "compact", "export", "clear"])
def test_a_folder_without_a_shard_stays_one(command: str, tmp_path: Path) -> None:
    archive = [tmp_path / "a.rkva"] if command == "export" else []

    result = store(command, tmp_path / "typo", *archive)

    assert result.exit_code == 2
    assert "holds no shard" in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["stats", "verify", "compact", "export", "import", "clear"])
def test_a_cut_file_is_refused_and_not_moved(command: str, shard: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.rkva"
    if command == "import":
        store("export", shard, archive)
    with data_file(shard).open("rb+") as file:
        file.truncate(8192)
    arguments: dict[str, list[object]] = {
        "export": [archive],
        "import": [archive],
        "clear": ["--yes"],
    }

    result = store(command, shard, *arguments.get(command, []))

    assert result.exit_code == 2
    assert "has 8192 of" in result.stderr
    assert data_file(shard).exists()


def test_an_export_that_cannot_read_on_leaves_no_archive(shard: Path, tmp_path: Path) -> None:
    writer = ShardWriter(shard, SETTINGS, ManualClock())  # no second environment in this process

    result = store("export", shard, tmp_path / "a.rkva")

    writer.close()
    assert result.exit_code == 2
    assert "could not be read to its end" in result.stderr
    assert list(tmp_path.glob("a.rkva*")) == []


def test_an_export_overwrites_nothing(shard: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.rkva"
    archive.write_text("mine")

    result = store("export", shard, archive)

    assert result.exit_code == 2
    assert archive.read_text() == "mine"


def test_a_missing_archive_is_one_line(shard: Path, tmp_path: Path) -> None:
    result = store("import", shard, tmp_path / "none.rkva")

    assert result.exit_code == 2
    assert "none.rkva cannot be read: No such file" in result.stderr


@given(st.integers(1, 1 << 44))
def test_the_budget_of_a_map_keeps_the_map_and_every_record(budget_bytes: int) -> None:
    settings = ShardSettings(budget_bytes)

    again = ShardSettings.for_map(settings.map_bytes)

    assert again.map_bytes == settings.map_bytes
    assert again.budget_bytes >= settings.budget_bytes


def test_a_folder_of_another_format_is_left_alone_and_its_records_move_by_archive(
    shard: Path, tmp_path: Path
) -> None:
    """docs/operations.md, "Upgrade of the store's format"."""
    archive, aside = tmp_path / "records.rkva", tmp_path / "aside"
    assert store("export", shard, archive).exit_code == 0
    identity_file = shard / "shard.json"
    identity = json.loads(identity_file.read_text())
    identity_file.write_text(json.dumps(identity | {"format": FOLDER_FORMAT + 1}))
    files = {path: path.read_bytes() for path in shard.rglob("*") if path.is_file()}

    with pytest.raises(StoreUnavailable, match=f"unknown format {FOLDER_FORMAT + 1}"):
        ShardWriter(shard, SETTINGS, ManualClock())
    refused = store("import", shard, archive)

    assert refused.exit_code != 0
    assert f"unknown format {FOLDER_FORMAT + 1}" in refused.output
    assert (
        files.items()
        <= {path: path.read_bytes() for path in shard.rglob("*") if path.is_file()}.items()
    )

    shard.rename(aside)
    ShardWriter(shard, SETTINGS, ManualClock()).close()
    assert not stored_keys(shard)
    assert store("import", shard, archive).exit_code == 0
    assert stored_keys(shard) == KEYS
