"""``rakv serve`` as a child process, and the processes below it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rakv_cluster.cli.local_service import LocalService, local_service
from rakv_cluster.clock import SystemClock
from rakv_cluster.testing.waiting import eventually

_START_TIMEOUT_S = 240.0


@contextmanager
def served(
    flags: Mapping[str, str], log: Path, tls: ssl.SSLContext | None = None
) -> Iterator[LocalService]:
    """Run ``rakv serve`` with ``flags`` until the context ends; ``tls`` as in ``local_service``.

    Raises ``AssertionError`` if it then does not end in order or leaves a process behind.
    """
    clock = SystemClock()
    with local_service(
        flags, log=log, clock=clock, ready_timeout_s=_START_TIMEOUT_S, tls=tls
    ) as service:
        # It answers a moment before it has said all there is to say about its start.
        eventually(lambda: "ready on" in log.read_text(), "rakv serve says that it is ready")
        yield service
        started = descendants(service.pid)
    if not log.read_text().endswith("stopped\n"):
        raise AssertionError(f"rakv serve did not stop in order:\n{log.read_text()}")
    eventually(
        lambda: not any(map(_alive, started)),
        "every process it started has ended",
        timeout_s=_START_TIMEOUT_S,
    )


def workers(service: LocalService) -> list[int]:
    """Process ids of its Worker replicas."""
    return [pid for pid in descendants(service.pid) if ":Worker" in command(pid)]


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    found: list[int] = []
    ahead = [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _parent(pid: int) -> int:
    """Parent's id; 0 for a process that has just ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def command(pid: int) -> str:
    """Its command line, which is its title where it has set one; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be collected by its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
