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
    """Show each replica's measured costs, break-even and observed acceptance, and hindsight.

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
    console = Console(soft_wrap=True, highlight=False)
    for replica, figures in content["replicas"].items():
        named = {
            name.removeprefix(_PREFIX): value
            for name, value in figures.items()
            if name.startswith(_PREFIX)
        }
        console.print(arm_table(replica, named))
        for line in summary(named):
            console.print(line)


def arm_table(replica: str, named: Mapping[str, Any]) -> Table:
    """One line per fixed number of drafts whose cost is known."""
    plain_ms = named["plain_step_seconds"] * 1e3
    table = Table(box=SIMPLE, title=f"replica {replica}: plain step {plain_ms:.1f} ms")
    for heading in ("drafts", "cost / plain step", "breaks even at", "tokens / step"):
        table.add_column(heading, justify="right")
    for drafts in sorted(named["cost_ratio"], key=int):
        ratio, needed, tokens = (
            named[what][drafts]
            for what in ("cost_ratio", "break_even_acceptance_ratio", "tokens_per_step")
        )
        table.add_row(drafts, f"{ratio:.2f}", f"{needed:.1%}", f"{tokens:.2f}")
    return table


def summary(named: Mapping[str, Any]) -> list[str]:
    """Observed acceptance, what was chosen, and how it compares with hindsight."""
    observed = ", ".join(
        f"{rate:.0%}" for _, rate in sorted(named["acceptance_ratio"].items(), key=_number)
    )
    chosen = sorted(named["steps_total"].items(), key=_number)
    total = sum(steps for _, steps in chosen) or 1.0
    shares = ", ".join(f"{drafts}: {steps / total:.0%}" for drafts, steps in chosen)
    return [
        f"acceptance by place in the block, given those before: {observed}",
        f"steps by number of drafts: {shares or 'none yet'}",
        f"time against never drafting: {named['overspend_ratio']:+.1%} (the ledger's)",
        f"best fixed number in hindsight: {named['best_fixed_drafts']:.0f}; "
        f"regret {named['regret_ratio']:+.1%}; decisions right for "
        f"{named['right_decisions_ratio']:.0%} of {named['requests_total']:.0f} requests",
    ]


def _number(item: tuple[str, float]) -> int:
    return int(item[0])
