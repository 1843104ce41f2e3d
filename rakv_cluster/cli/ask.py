"""``rakv ask``: one question from a terminal, and what the cache did for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rakv_cluster.client import Answer, Client, Document, Message
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.client.transport import DEFAULT_URL
from rakv_cluster.errors import ConfigError


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    *,
    doc: Annotated[
        list[Path] | None,
        typer.Option("--doc", "-d", help="A text file to ask about; may be given several times."),
    ] = None,
    url: Annotated[str, typer.Option(help="Where the service answers.")] = DEFAULT_URL,
    api_key: Annotated[
        str, typer.Option(envvar="RAKV_API_KEY", help="Where the service asks for one.")
    ] = "",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")
    ] = 0.0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute everything anew.")] = False,
) -> None:
    """Ask a running service (see `rakv serve`); the answer streams, then a line on reuse.

    Example: rakv ask "Who wrote it?" --doc report.txt --doc appendix.txt
    """
    messages = [Message("system", system)] if system else []
    with (
        Client(url, api_key=api_key, retries=NO_RETRIES) as client,
        client.stream_chat(
            [*messages, Message("user", question)],
            documents=[Document(_read(path), path.name) for path in doc or []],
            max_tokens=max_tokens,
            temperature=temperature,
            reuse="off" if no_cache else "exact",
        ) as stream,
    ):
        for piece in stream:
            print(piece, end="", flush=True)
        answer = stream.answer
    print()
    Console(stderr=True, soft_wrap=True).print(summary(answer), style="dim", highlight=False)


def summary(answer: Answer) -> str:
    """One line: time to first token, where the prompt's KV came from, decode rate."""
    tokens = answer.rakv["tokens"]
    return (
        f"first token after {answer.ttft_s:.2f} s; {answer.usage['prompt_tokens']} prompt tokens: "
        f"{tokens['ram']} reused from RAM, {tokens['disk']} from disk, "
        f"{tokens['computed']} computed; "
        f"{answer.output_tokens} tokens out, {answer.tokens_per_s:.1f} per second"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"document {path} cannot be read: {error}", field="doc") from error
