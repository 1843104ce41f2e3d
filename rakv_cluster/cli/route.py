"""``rakv route``: where requests go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rakv_cluster.client.transport import DEFAULT_URL
from rakv_cluster.errors import ConfigError, Unavailable

app = typer.Typer(no_args_is_help=True, help="Where requests go, and why.")

_TIMEOUT_S = 30.0
_COLUMNS = {
    "expected_ms": "expected", "backlog_ms": "backlog", "slot_wait_ms": "slots", "load_ms": "load",
    "prefill_ms": "prefill", "decode_ms": "decode", "crowding_ms": "crowding",
    "reused_tokens": "reused",
}  # fmt: skip


@app.callback()
def root() -> None:
    """Where requests go, and why."""


@app.command()
def explain(
    request: Annotated[
        Path, typer.Argument(help="A file with the JSON body of a (chat) completion request.")
    ],
    *,
    url: Annotated[str, typer.Option(help="Where the service answers.")] = DEFAULT_URL,
    api_key: Annotated[
        str, typer.Option(envvar="RAKV_API_KEY", help="Where the service asks for one.")
    ] = "",
) -> None:
    """Show each replica's expected time for a request and which one it would go to.

    Nothing is generated. Example: rakv route explain request.json
    """
    try:
        body = request.read_bytes()
    except OSError as error:
        raise ConfigError(f"request {request} cannot be read: {error}", field="request") from error
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/v1/route/explain", content=body, headers=headers, timeout=_TIMEOUT_S
        )
        content: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable(f"no answer from {url}: {error}") from error
    if answer.is_error:
        raise ConfigError(str(content.get("error", {}).get("message", answer.reason_phrase)))
    Console(soft_wrap=True).print(explanation_table(content))


def explanation_table(content: dict[str, Any]) -> Table:
    """The answer of ``/v1/route/explain``, the chosen replica first."""
    table = Table(
        box=SIMPLE,  # fits a terminal of 80 columns
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=f"{content['prompt_tokens']} prompt tokens -> {content['chosen']} "
        f"({content['reason']})",
        caption="in ms; fastest: the least of expected + crowding",
    )
    table.add_column("replica", no_wrap=True)
    for heading in _COLUMNS.values():
        table.add_column(heading, justify="right")
    lines = sorted(
        content["replicas"],
        key=lambda line: (
            line["replica"] != content["chosen"],
            line["expected_ms"] + line["crowding_ms"],
        ),
    )
    for line in lines:
        *terms, tokens = (line[name] for name in _COLUMNS)
        table.add_row(line["replica"], *(f"{ms:.1f}" for ms in terms), str(tokens))
    return table
