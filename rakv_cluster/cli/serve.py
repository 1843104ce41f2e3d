"""``rakv serve`` and ``rakv settings``."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rakv_cluster.config import Settings, load_settings
from rakv_cluster.errors import ConfigError
from rakv_cluster.serving.auth import configured_keys
from rakv_cluster.serving.tls import tls_files

if TYPE_CHECKING:
    from rakv_cluster.serving.app import Running

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML or TOML file of settings; default: RAKV_CONFIG."),
]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting that `rakv settings` lists; repeatable."
    ),
]


def serve(
    *,
    model: Annotated[
        str | None, typer.Option(help="Model name, Hugging Face id or folder.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Copies of the model.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per copy; 0: share all cores.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    store_dir: Annotated[Path | None, typer.Option(help="Folder of the KV store.")] = None,
    ram_budget: Annotated[str | None, typer.Option(help="KV kept in RAM, such as 2GiB.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="KV kept on disk, such as 50GiB.")] = None,
    config: ConfigFile = None,
    extra: Extra = None,
) -> None:
    """Start a service on this machine and keep it running until Ctrl-C."""
    flags = {
        "model": model,
        "host": host,
        "port": port,
        "replicas": replicas,
        "threads": threads,
        "device": device,
        "dtype": dtype,
        "store_dir": store_dir,
        "ram_budget_bytes": ram_budget,
        "disk_budget_bytes": disk_budget,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    chosen = load_settings({**given, **_pairs(extra)}, file=config)
    # Imported late, like Ray below: `rakv --help` must not wait for torch.
    from rakv_cluster.model.fetch import resolve
    from rakv_cluster.model.loader import check_model, load_tokenizer
    from rakv_cluster.speculation.draft_model import check_vocabulary

    # What can fail fast does so here: a wrong model name must not cost a start of Ray.
    configured_keys(chosen)
    if chosen.has_tls:
        tls_files(chosen)
    source = resolve(chosen.model, chosen.cache_path)
    check_model(source, device=chosen.device)
    if chosen.draft_model:
        draft = resolve(chosen.draft_model, chosen.cache_path)
        check_model(draft, device=chosen.device)
        check_vocabulary(load_tokenizer(source), load_tokenizer(draft))
    _check_port(chosen.host, chosen.port, "port")
    if chosen.grpc_port:
        _check_port(chosen.grpc_host, chosen.grpc_port, "grpc_port")
    run(chosen, Console(stderr=True, soft_wrap=True))


def settings(*, config: ConfigFile = None, extra: Extra = None) -> None:
    """List every setting with its value here, and what it means."""
    chosen = load_settings(_pairs(extra), file=config)
    table = Table("setting", "value", "meaning")
    for name, field in Settings.model_fields.items():
        meaning = field.description or ""
        if choices := _choices(field.annotation):
            meaning += f" ({' | '.join(choices)})"
        table.add_row(name, _shown(getattr(chosen, name)), meaning)
    console = Console()
    console.print(table)
    console.print(
        "Set them as --set NAME=VALUE, RAKV_NAME in the environment, or in a --config file; "
        "the first wins.",
        highlight=False,
    )


def _shown(value: object) -> str:
    """A setting's value as it would be written."""
    if isinstance(value, ByteSize):
        return value.human_readable()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value == Path() else str(value)


def _choices(kind: object) -> list[str]:
    """The words that a setting of this type may be, or nothing where it is not a choice."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []


def run(chosen: Settings, console: Console) -> None:
    """Serve until SIGINT or SIGTERM; stops everything it started."""
    from rakv_cluster.serving.app import running

    console.print(f"starting {escape(chosen.model)} ...", highlight=False)
    try:
        with running(chosen, on_ray=_stop_on_signals) as service:
            for notice in _warnings(service):
                console.print(f"[bold yellow]warning:[/] {escape(notice)}", highlight=False)
            console.print(f"ready on {service.url} (Ctrl-C stops it)", highlight=False)
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped", highlight=False)


def _stop_on_signals() -> None:
    """Unwind the start or the service on SIGINT and SIGTERM alike; a second one is ignored, so
    that nothing cuts the orderly end short."""

    def stop(*_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _SIGNALS:
        signal.signal(number, stop)


def _warnings(service: Running) -> Iterator[str]:
    yield from service.notices
    if not service.on_loopback:
        yield (
            f"Ray's own processes bound {service.node_address} and ports on every address, which "
            "other machines may reach; run `rakv` under scripts/loopback to keep them local"
        )


def _pairs(extra: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in extra or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write it as NAME=VALUE")
        pairs[name.strip().replace("-", "_")] = value
    return pairs


def _check_port(host: str, port: int, field: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}", field=field) from (
                error
            )
