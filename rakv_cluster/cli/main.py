"""``rakv``: start a service, ask it, fetch models."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

import rakv_cluster
from rakv_cluster.cli import (
    ask,
    batch,
    calibrate,
    demo,
    keys,
    models,
    route,
    serve,
    speculation,
    store,
)
from rakv_cluster.errors import RakvError

USAGE_ERROR = 2


class _Group(TyperGroup):
    """Ends with one clear line and exit code 2 on an error of ours, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RakvError as error:
            Console(stderr=True, soft_wrap=True).print(
                f"[bold red]error:[/] {escape(error.message)}", highlight=False
            )
            raise typer.Exit(USAGE_ERROR) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A KV-cache service for language models: documents asked about twice are computed once.",
)
app.command()(serve.serve)
app.command()(serve.settings)
app.command()(ask.ask)
app.command()(demo.demo)
app.command()(calibrate.calibrate)
app.add_typer(models.app, name="model")
app.add_typer(keys.app, name="key")
app.add_typer(batch.app, name="batch")
app.add_typer(route.app, name="route")
app.add_typer(speculation.app, name="speculation")
app.add_typer(store.app, name="store")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rakv-cluster {rakv_cluster.__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """What every command shares."""
