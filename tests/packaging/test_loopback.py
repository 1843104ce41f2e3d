"""scripts/loopback: what the wrapped command sees; nothing of it is lost in the wrapper."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

LOOPBACK = Path(__file__).parents[2] / "scripts" / "loopback"
TALK = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    "socket.create_connection(s.getsockname()); print('connected')"
)


def run(*command: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LOOPBACK), *command], capture_output=True, text=True, timeout=30, check=False, **kwargs
    )


def elsewhere() -> list[str]:
    """What runs a command in a namespace that is not a loopback one (its interface is down).

    The tests themselves may run in one. Empty where namespaces are not permitted.
    """
    program = shutil.which("unshare")
    tries = [[program, flags] for flags in ("-n", "-rn") if program]
    return next(
        (
            command
            for command in tries
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
        ),
        [],
    )


ELSEWHERE = elsewhere()


def local_addresses(fib_trie: str) -> set[str]:
    """The IPv4 addresses of a namespace's interfaces, from its routing table."""
    lines = [line.split() for line in fib_trie.splitlines()]
    return {
        before[-1] for before, line in itertools.pairwise(lines) if line == ["/32", "host", "LOCAL"]
    }


needs_namespaces = pytest.mark.skipif(
    not ELSEWHERE, reason="network namespaces are not permitted here"
)


@pytest.fixture
def without_unshare(tmp_path: Path) -> dict[str, str]:
    """An environment in which making a namespace fails, as in an unprivileged container."""
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\nexit 1\n")
    refusing.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@needs_namespaces
def test_loopback_is_the_only_interface_with_an_address_and_it_is_up() -> None:
    result = run("python3", "-c", TALK)
    assert result.stdout == "connected\n"
    assert local_addresses(run("cat", "/proc/net/fib_trie").stdout) == {"127.0.0.1"}


@needs_namespaces
def test_inside_a_loopback_namespace_no_second_one_is_made() -> None:
    show = "readlink /proc/self/ns/net"
    script = f'{show}; "{LOOPBACK}" sh -c \'{show}; "{LOOPBACK}" {show}\''
    done = subprocess.run(
        [*ELSEWHERE, "sh", "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    without, outer, inner = done.stdout.split()
    assert outer == inner != without


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_unprivileged_user_gets_a_namespace_of_their_own() -> None:
    nobody = ["setpriv", "--reuid", "65534", "--clear-groups"]
    if subprocess.run([*nobody, "unshare", "-rn", "true"], check=False).returncode != 0:
        pytest.skip("user namespaces are not permitted here")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o755)
        script = shutil.copy(LOOPBACK, folder)
        command = [*nobody, script, "cat", "/proc/net/fib_trie"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert local_addresses(result.stdout) == {"127.0.0.1"}


def test_the_exit_code_is_the_commands() -> None:
    assert run("sh", "-c", "exit 37").returncode == 37


def test_arguments_arrive_unchanged() -> None:
    arguments = ["a b", "", "$HOME", "'", '"', "*", "-n"]
    result = run("python3", "-c", "import sys; print(sys.argv[1:])", *arguments)
    assert result.stdout == f"{arguments}\n"


def test_a_signal_reaches_the_command_itself() -> None:
    process = subprocess.Popen(
        [str(LOOPBACK), "python3", "-c", "print('up', flush=True); import signal; signal.pause()"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_without_permission_it_warns_with_the_address_and_runs_the_command(
    without_unshare: dict[str, str],
) -> None:
    command = [*ELSEWHERE, str(LOOPBACK), "sh", "-c", "echo ran; exit 5"]
    result = subprocess.run(
        command, env=without_unshare, capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout) == (5, "ran\n")
    warning = result.stderr.strip()
    assert warning.startswith("loopback: no network namespace permitted here; Ray will bind ")
    assert warning.rpartition("bind ")[2]


def test_without_a_command_it_explains_itself() -> None:
    result = run()
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ")
