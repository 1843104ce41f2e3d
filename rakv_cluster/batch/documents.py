"""A folder of files as documents: text, Markdown, code, HTML and PDF."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rakv_cluster.batch.html_text import html_to_text
from rakv_cluster.errors import ConfigError

_HTML = frozenset({".html", ".htm", ".xhtml"})
_LARGEST_BYTES = 64 * 1024**2
_MOST_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class DocumentSet:
    """Texts by the file's path in the folder, and the files that hold none, with the reason."""

    texts: dict[str, str]
    skipped: dict[str, str]


class Unreadable(Exception):
    """A file that holds no text; the message says why."""


def load_documents(folder: Path) -> DocumentSet:
    """All files below ``folder`` but hidden ones, in the order of their paths.

    Links that lead out of the folder are not followed. Raises :class:`ConfigError` if there is no
    such folder or no text in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"no such folder: {folder}", field="docs")
    texts: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        try:
            name.encode()
            texts[name] = read_text(path)
        except UnicodeEncodeError:
            skipped[os.fsencode(name).decode(errors="backslashreplace")] = "its name is not UTF-8"
        except Unreadable as reason:
            skipped[name] = str(reason)
    if not texts:
        raise ConfigError(f"no file with text in {folder}", field="docs")
    return DocumentSet(texts, skipped)


def read_text(path: Path) -> str:
    """One file's text; raises :class:`Unreadable`."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise Unreadable(f"larger than {_LARGEST_BYTES >> 20} MiB")
        if path.suffix.lower() == ".pdf":
            text = _pdf_text(path)
        else:
            text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Unreadable(error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        raise Unreadable("not UTF-8") from error
    if "\0" in text:
        raise Unreadable("binary")
    if path.suffix.lower() in _HTML:
        text = html_to_text(text)
    if not text.strip():
        raise Unreadable("no text")
    return text


def _files(folder: Path) -> Iterator[Path]:
    root = folder.resolve()
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(paths) > _MOST_FILES:
        raise ConfigError(f"more than {_MOST_FILES} files in {folder}", field="docs")
    for path in paths:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.resolve().is_relative_to(root):
            yield path


def _pdf_text(path: Path) -> str:
    # Imported late: an extra of the package, and needed by few jobs.
    try:
        from pypdf import PdfReader  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ConfigError("PDF files need pypdf: pip install 'rakv-cluster[batch]'") from error
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
    except Exception as error:  # pypdf raises anything on damaged or locked files
        raise Unreadable(f"not a PDF that can be read: {error}") from error
