"""``rakv calibrate``: what blending costs a model in fidelity, kept where its replicas look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rakv_cluster.config import load_settings
from rakv_cluster.errors import ConfigError

if TYPE_CHECKING:
    from rakv_cluster.reuse.calibration import Calibration

_FEWEST_PROMPTS = 4


def calibrate(
    model: Annotated[
        str | None, typer.Option("--model", help="A model as `rakv serve --model` takes it.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            help="Folder of text files like those that will be asked about; default: help texts "
            "of Python's standard library.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=_FEWEST_PROMPTS, help="Prompts to measure.")] = 16,
    document_tokens: Annotated[
        int, typer.Option(min=16, help="About so many tokens in each of a prompt's 6 documents.")
    ] = 200,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Cache folder of the service.")
    ] = None,
) -> None:
    """Measure how far blended answers are from full recompute, by the share that is repaired.

    `reuse: blend` obeys the curve from the service's next start on. Takes minutes.
    """
    given = {"model": model, "cache_dir": cache_dir}
    settings = load_settings({name: value for name, value in given.items() if value is not None})
    # Imported late: the other commands must not wait for torch.
    from rakv_cluster.model.fetch import resolve
    from rakv_cluster.model.loader import load_model
    from rakv_cluster.reuse.calibrating import measure_curves
    from rakv_cluster.reuse.calibration import (
        Calibration,
        calibration_path,
        save_calibration,
    )
    from rakv_cluster.reuse.probing import probe_settings
    from rakv_cluster.serving.calibration_texts import (
        STANDARD_LIBRARY,
        calibration_prompts,
    )
    from rakv_cluster.serving.prompting import PromptRenderer

    console = Console()
    loaded = load_model(
        resolve(settings.model, settings.cache_path),
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads_per_replica,
    )
    if loaded.rotation.refusal:
        raise ConfigError(f"this model cannot blend: {loaded.rotation.refusal}")
    renderer = PromptRenderer(loaded.tokenizer)
    cases = calibration_prompts(renderer, texts, count=prompts, tokens=document_tokens)
    origin = str(texts) if texts else STANDARD_LIBRARY
    path = calibration_path(settings.cache_path, loaded.card.digest)
    curves = measure_curves(
        loaded.runner,
        loaded.rotation,
        cases,
        loaded.card.eos_token_ids,
        probe=probe_settings(loaded.card.layout.layers),
    )
    for done, found in enumerate(curves, start=1):
        console.print(f"{done} of {len(cases)} prompts", highlight=False)
        if done < _FEWEST_PROMPTS:
            continue
        # Kept as it grows: an interrupted run leaves what it measured.
        calibration = Calibration(loaded.card.model_id, done, origin, found.plain, found.probed)
        save_calibration(calibration, path)
    _show(console, calibration, path)


def _show(console: Console, calibration: Calibration, path: Path) -> None:
    for title, points in (
        ("without the question probe", calibration.points),
        ("with the question probe", calibration.probed),
    ):
        table = Table(
            "repaired", "KL mean", "KL p95 (upper)", "top-1 equal", "greedy tokens equal",
            title=title,
        )  # fmt: skip
        for point in points:
            table.add_row(
                f"{point.fraction:.0%}",
                f"{point.kl:.3f} [{point.kl_low:.3f}, {point.kl_high:.3f}]",
                f"{point.kl_p95:.3f} ({point.kl_p95_upper:.3f})",
                f"{point.top1:.0%} [{point.top1_low:.0%}, {point.top1_high:.0%}]",
                f"{point.agreement:.0%} [{point.agreement_low:.0%}, {point.agreement_high:.0%}]",
            )
        console.print(table)
    for budget in (0.05, 0.1, 0.2):
        for probed in (False, True):
            choice = calibration.choose(budget, probed=probed)
            met = choice.refusal or f"repair {choice.fraction:.0%}"
            way = "with" if probed else "without"
            console.print(f"max_kl {budget}, {way} probe: {met}", highlight=False, soft_wrap=True)
    console.print(f"kept in {path}", highlight=False, soft_wrap=True)
