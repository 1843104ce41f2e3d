"""A finished job's results as files, in the order of the input.

The answers depend on the job alone, so a job that was killed and resumed writes the same bytes as
one that was not. What depends on the moment, reuse and times, goes to a file beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rakv_cluster.batch.journal import Journal, RowResult, sync_folder
from rakv_cluster.batch.rows import Job, Row
from rakv_cluster.errors import ConfigError

FORMATS = (".jsonl", ".parquet")
_GROUP_ROWS = 1024


def stats_path(out: Path) -> Path:
    """Where the statistics of the answers in ``out`` go; apart from those of ``out`` in another
    format."""
    return out.with_name(f"{out.name}.stats.jsonl")


def check_format(out: Path) -> None:
    """Raise :class:`ConfigError` unless ``out`` can be written here."""
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out must end in {' or '.join(FORMATS)}", field="out")
    if not out.parent.is_dir():
        raise ConfigError(f"no such folder: {out.parent}", field="out")
    if out.suffix == ".parquet":
        _parquet()


def write_results(job: Job, journal: Journal, out: Path) -> None:
    """Write statistics, then answers, each whole or not at all; every row must have a result."""
    count = len(job.rows)
    stats = (_stats(r, x) for r, x in zip(job.rows, journal.results(count), strict=True))
    _replace(stats_path(out), lambda path: _write_lines(path, stats))
    answers = (_answer(r, x) for r, x in zip(job.rows, journal.results(count), strict=True))
    write = _write_parquet if out.suffix == ".parquet" else _write_lines
    _replace(out, lambda path: write(path, answers))


def _answer(row: Row, result: RowResult) -> dict[str, Any]:
    return {
        "id": row.id,
        "documents": list(row.documents),
        "question": row.question,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "error_code": result.error_code,
        "error": result.error,
    }


def _stats(row: Row, result: RowResult) -> dict[str, Any]:
    return {
        "id": row.id,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "ttft_s": result.ttft_s,
        "total_s": result.total_s,
    }


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    pa, pq = _parquet()
    text = pa.string()
    schema = pa.schema(
        [
            ("id", text), ("documents", pa.list_(text)), ("question", text), ("text", text),
            ("finish_reason", text), ("prompt_tokens", pa.int64()), ("output_tokens", pa.int64()),
            ("error_code", text), ("error", text),
        ]
    )  # fmt: skip
    with pq.ParquetWriter(path, schema) as writer:
        for group in _groups(iter(rows)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _groups(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while group := list(islice(rows, _GROUP_ROWS)):
        yield group


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow  # noqa: PLC0415  # an extra of the package
        import pyarrow.parquet  # noqa: PLC0415  # an extra of the package
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow: pip install 'rakv-cluster[batch]'", field="out"
        ) from error
    return pyarrow, pyarrow.parquet


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside ``path``, then put it in its place at once."""
    part = path.with_name(f".{path.name}.part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
