"""``rakv store``: look after a shard's folder while no service has it open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.errors import CorruptRecord
from rakv_cluster.store import offline

app = typer.Typer(
    no_args_is_help=True, help="Check, measure, compact, move or empty a node's KV on disk."
)

Folder = Annotated[
    Path, typer.Argument(help="A shard's folder, such as ~/.cache/rakv/store/shard.")
]


@app.command()
def verify(folder: Folder) -> None:
    """Read and check every record, changing nothing. Exit code 1 if any is damaged."""
    # In a process of its own: reading a badly damaged file may kill the reader.
    command = [sys.executable, "-m", "rakv_cluster.store.verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or done.stderr:
        why = done.stdout.strip() or f"reading it ended the reader ({done.returncode})"
        raise CorruptRecord(f"{folder} cannot be verified: {why}")
    typer.echo(done.stdout, nl=False)
    raise typer.Exit(done.returncode)


@app.command()
def stats(folder: Folder) -> None:
    """Records, tokens and bytes, in all and by namespace (a model and a tenant)."""
    summary = offline.summarize_shard(folder)
    typer.echo(
        f"{summary.records} records of {summary.tokens} tokens, {summary.pins} pinned; "
        f"{_size(summary.stored_bytes)} of {_size(summary.budget_bytes)} used, "
        f"file {_size(summary.file_bytes)}"
    )
    table = Table("namespace", "stored")
    for namespace, stored_bytes in sorted(summary.namespaces.items(), key=lambda row: -row[1]):
        table.add_row(namespace.hex()[:16], _size(stored_bytes))
    if summary.namespaces:
        Console().print(table)


@app.command()
def compact(folder: Folder) -> None:
    """Rewrite the file without free pages and damaged records."""
    before_bytes = offline.summarize_shard(folder).file_bytes
    with offline.open_shard(folder, SystemClock()) as writer:
        copied = writer.compact()
    after_bytes = offline.summarize_shard(folder).file_bytes
    typer.echo(
        f"{copied.records} records kept, {copied.damaged} damaged left out; "
        f"file {_size(before_bytes)} -> {_size(after_bytes)}"
    )


@app.command()
def export(folder: Folder, archive: Annotated[Path, typer.Argument(help="A new file.")]) -> None:
    """Copy all intact records into one file (docs/store-format.md, section 4)."""
    done = offline.export_shard(folder, archive)
    typer.echo(f"{done.records} records exported, {done.damaged} damaged left out")


@app.command("import")
def import_records(
    folder: Folder,
    archive: Annotated[Path, typer.Argument(help="A file that `rakv store export` wrote.")],
    *,
    budget: Annotated[
        str,
        typer.Option(help="Budget of a folder that is new; default: setting disk_budget_bytes."),
    ] = "",
) -> None:
    """Add a file's records to a shard, evicting others if its budget asks for it."""
    settings = load_settings({"disk_budget_bytes": budget} if budget else {})
    done = offline.import_archive(
        folder, archive, SystemClock(), new_budget_bytes=int(settings.disk_budget_bytes)
    )
    typer.echo(
        f"{done.stored} records imported, {done.duplicates} were there, {done.refused} refused; "
        f"{done.evicted} others evicted"
    )


@app.command()
def clear(
    folder: Folder,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove all records and give the disk back."""
    with offline.open_shard(folder, SystemClock()) as writer:
        if not yes:
            typer.confirm(f"Remove {writer.stats().records} records from {folder}?", abort=True)
        removed = offline.clear_shard(writer)
    typer.echo(f"{removed} records removed")


def _size(count: int) -> str:
    return ByteSize(count).human_readable()
