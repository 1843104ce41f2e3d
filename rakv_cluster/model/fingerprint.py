"""Which weights these are: one digest over the content of a model folder's weight files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from rakv_cluster.errors import ConfigError

_KNOWN_FILE = ".rakv-fingerprint.json"
_READ_BYTES = 1 << 22

_Entry = tuple[int, int, str]


def weights_fingerprint(folder: Path) -> bytes:
    """SHA-256 over the content of the folder's safetensors files.

    Each file's digest is kept beside them under its size and modification time, so that a start
    does not read everything again; where that file cannot be written it is computed each time.
    Raises :class:`ConfigError` if there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no safetensors weights", field="model")
    known = _read_known(folder / _KNOWN_FILE)
    entries = {file.name: _file_entry(file, known.get(file.name)) for file in files}
    if entries != known:
        _write_known(folder / _KNOWN_FILE, entries)
    total = hashlib.sha256()
    for name, (_, _, digest) in sorted(entries.items()):
        total.update(f"{name}:{digest}\n".encode())
    return total.digest()


def _file_entry(file: Path, known: _Entry | None) -> _Entry:
    status = file.stat()
    if known is not None and known[:2] == (status.st_size, status.st_mtime_ns):
        return known
    return (status.st_size, status.st_mtime_ns, file_sha256(file))


def file_sha256(file: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read_known(path: Path) -> dict[str, _Entry]:
    try:
        content = json.loads(path.read_text())
        return {str(name): (int(a), int(b), str(c)) for name, (a, b, c) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # absent or damaged: computed again


def _write_known(path: Path, entries: dict[str, _Entry]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(entries))
        temporary.replace(path)
    except OSError:
        return  # a read-only folder: the next start computes it again
