"""``rakv speculation``: what drafting costs and brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rakv_cluster.client.transport import DEFAULT_URL
from rakv_cluster.errors import ConfigError, Unavailable

app = typer.Typer(no_args_is_help=True, help="What drafting costs and brings.")

_TIMEOUT_S = 30.0
_PREFIX = "speculation_"


@app.callback()
def root() -> None:
    """What drafting costs and brings."""


@app.command()
def report(
    *,
    url: Annotated[str, typer.Option(help="Where the service answers.")] = DEFAULT_URL,
    api_key: Annotated[
        str, typer.Option(envvar="RAKV_API_KEY", help="Where the service asks for one (admin).")
    ] = "",
) -> None:
    """Show one replica's measured costs, break-even and observed acceptance, and hindsight.

    Example: rakv speculation report
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/cache/stats", headers=headers, timeout=_TIMEOUT_S)
        content: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable(f"no answer from {url}: {error}") from error
    if answer.is_error:
        raise ConfigError(str(content.get("error", {}).get("message", answer.reason_phrase)))
    named = {
        name.removeprefix(_PREFIX): float(value)
        for name, value in content["replica"].items()
        if name.startswith(_PREFIX)
    }
    console = Console(soft_wrap=True, highlight=False)
    console.print(arm_table(named))
    for line in summary(named):
        console.print(line)


def arm_table(named: Mapping[str, float]) -> Table:
    """One line per fixed number of drafts whose cost is known."""
    table = Table(box=SIMPLE, title=f"plain step {named['base_ms']:.1f} ms")
    for heading in ("drafts", "cost / plain step", "breaks even at", "tokens / step"):
        table.add_column(heading, justify="right")
    arms = sorted(
        int(name.split("_")[1])
        for name in named
        if name.startswith("arm_") and name.endswith("_cost_ratio")
    )
    for drafts in arms:
        ratio, needed, tokens = (
            named[f"arm_{drafts}_{what}"]
            for what in ("cost_ratio", "break_even_acceptance", "tokens_per_step")
        )
        table.add_row(str(drafts), f"{ratio:.2f}", f"{needed:.1%}", f"{tokens:.2f}")
    return table


def summary(named: Mapping[str, float]) -> list[str]:
    """Observed acceptance, what was chosen, and how it compares with hindsight."""
    places = sorted(int(name.rsplit("_", 1)[1]) for name in named if name.startswith("acceptance"))
    observed = ", ".join(f"{named[f'acceptance_at_{place}']:.0%}" for place in places)
    chosen = {
        int(name.split("_")[2]): steps
        for name, steps in named.items()
        if name.startswith("steps_of_")
    }
    total = sum(chosen.values()) or 1.0
    shares = ", ".join(f"{drafts}: {chosen[drafts] / total:.0%}" for drafts in sorted(chosen))
    return [
        f"acceptance by place in the block, given those before: {observed}",
        f"steps by number of drafts: {shares or 'none yet'}",
        f"time against never drafting: {named['overspend_share']:+.1%} (the ledger's)",
        f"best fixed number in hindsight: {named['best_fixed_drafts']:.0f}; "
        f"regret {named['regret']:+.1%}; decisions right for {named['decision_accuracy']:.0%} "
        f"of {named['requests_total']:.0f} requests",
    ]
