"""``rakv key``: make, list and revoke API keys. A running service notices within a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rakv_cluster.errors import ConfigError
from rakv_cluster.serving.keys import KeyTable, TenantLimits, new_key, read_table, write_table

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")

KeyFile = Annotated[
    Path, typer.Option("--file", envvar="RAKV_API_KEYS_FILE", help="The file of keys.")
]
Limit = Annotated[int | None, typer.Option(min=0, help="0: no limit.")]


@app.command()
def new(
    file: KeyFile,
    tenant: Annotated[str, typer.Option(help="Whose key it is; tenants share no cached KV.")],
    *,
    admin: Annotated[bool, typer.Option("--admin", help="Open metrics and operations.")] = False,
) -> None:
    """Add a key to the file (made if missing) and print it: the file keeps only its hash."""
    table = read_table(file) if file.exists() else KeyTable()
    key, entry = new_key(tenant, admin=admin)
    write_table(file, replace(table, keys={**table.keys, entry.id: entry}))
    typer.echo(key)


@app.command("list")
def list_keys(file: KeyFile) -> None:
    """The keys' ids, tenants and scopes, and each tenant's limits."""
    table = read_table(file)
    shown = Table("id", "tenant", "admin", "requests/min", "tokens/min", "concurrent")
    for entry in table.keys.values():
        limits = table.limits(entry.tenant)
        amounts = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)
        shown.add_row(
            entry.id,
            entry.tenant,
            "yes" if entry.admin else "no",
            *(str(amount) if amount else "no limit" for amount in amounts),
        )
    Console().print(shown)


@app.command()
def revoke(
    file: KeyFile, key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id.")]
) -> None:
    """Take a key out of the file."""
    table = read_table(file)
    if key_id not in table.keys:
        raise ConfigError(f"no key has the id '{key_id}'", field="ID")
    kept = {name: entry for name, entry in table.keys.items() if name != key_id}
    tenants = {entry.tenant for entry in kept.values()}
    limits = {name: limit for name, limit in table.tenants.items() if name in tenants}
    write_table(file, KeyTable(kept, limits))


@app.command()
def limit(
    file: KeyFile,
    tenant: Annotated[str, typer.Argument(help="Whose limits.")],
    *,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent: Limit = None,
) -> None:
    """Set what a tenant may use on each ingress; limits that are not named stay as they are."""
    table = read_table(file)
    if all(entry.tenant != tenant for entry in table.keys.values()):
        raise ConfigError(f"no key belongs to the tenant '{tenant}'", field="TENANT")
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    named = {name: amount for name, amount in given.items() if amount is not None}
    if not named:
        raise ConfigError("name a limit to set, such as --concurrent 4")
    limits = TenantLimits(**{**table.limits(tenant).model_dump(), **named})
    write_table(file, replace(table, tenants={**table.tenants, tenant: limits}))
