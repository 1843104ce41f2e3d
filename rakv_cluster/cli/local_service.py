"""A service of one's own on this machine: started as a subprocess, waited for, stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from rakv_cluster.clock import Clock
from rakv_cluster.errors import Unavailable

STOP_TIMEOUT_S = 180.0
POLL_S = 0.2
_PORTS = range(20_000, 32_768)
_PORT_ATTEMPTS = 64


@dataclass(frozen=True, slots=True)
class LocalService:
    """A running ``rakv serve``: where it answers, its process id and its log file."""

    base_url: str
    pid: int
    log: Path


@contextlib.contextmanager
def local_service(
    flags: Mapping[str, str],
    *,
    log: Path,
    clock: Clock,
    ready_timeout_s: float = 600.0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[LocalService]:
    """Run ``rakv serve`` with ``flags`` on a free loopback port for the length of a ``with``.

    ``tls``: what to trust, where the flags make it speak TLS. Yields once ``/readyz`` answers 200;
    stops the process it started, and nothing else, on exit.
    Raises :class:`Unavailable`, with the end of the log, if the service does not become ready.
    """
    port = free_port()
    command = [sys.executable, "-m", "rakv_cluster.cli", "serve", "--port", str(port)]
    for name, value in flags.items():
        command += [f"--{name}", value]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    scheme = "http" if tls is None else "https"
    service = LocalService(f"{scheme}://127.0.0.1:{port}", process.pid, log)
    try:
        _wait_until_ready(service, process, clock, ready_timeout_s, tls)
        yield service
    finally:
        _stop(process)


def free_port() -> int:
    """A TCP port that nothing on loopback listens on now, and that is not given out by chance.

    The service binds it seconds later: by then Ray has opened dozens of ports. Those come from
    the kernel's range for outgoing connections (IANA's, RFC 6335: from 49152; Linux: from 32768)
    and from Ray's own for workers (10002 to 19999), so this one lies between. Raises
    :class:`Unavailable` if none of many tried is free.
    """
    for port in random.SystemRandom().sample(_PORTS, _PORT_ATTEMPTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise Unavailable(f"no free port on 127.0.0.1 among {_PORT_ATTEMPTS} tried in {_PORTS}")


def _wait_until_ready(
    service: LocalService,
    process: subprocess.Popen[bytes],
    clock: Clock,
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> None:
    trusted = ssl.create_default_context() if tls is None else tls
    deadline_s = clock.monotonic_s() + timeout_s
    while clock.monotonic_s() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if (
                httpx.get(f"{service.base_url}/readyz", timeout=5, verify=trusted).status_code
                == 200
            ):
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_S)
            raise Unavailable(f"rakv serve ended with code {code}:\n{_log_end(service.log)}")
    raise Unavailable(f"rakv serve not ready in {timeout_s:.0f} s:\n{_log_end(service.log)}")


def _log_end(log: Path, limit_bytes: int = 4000) -> str:
    return log.read_bytes()[-limit_bytes:].decode(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
