"""Runs `ray up` where it can stop nothing but what it started; used by test_ray_up.py.

    unshare -n -m -p --fork --mount-proc python ray_up_arena.py WORK REPOSITORY

``ray up`` and ``ray down`` run ``ray stop`` on each node, which ends every Ray process it can see.
So this process (the operator) and each node have PID and mount namespaces of their own, with
/proc, /tmp, /run and a home folder of their own; they share one network namespace, in which
loopback is all there is. A node is an SSH server on an address of 127/8. WORK/facts.json says what
happened.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

HEAD, WORKER = "127.0.0.1", "127.0.0.2"
PORT = 8000
DEADLINE_S = 240.0
HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)


def main(work: Path, repository: Path) -> None:
    """The operator's side, from an empty network to an empty network."""
    loopback_up()
    own_folders(work, repository, "operator")
    files = write_files(work, repository)
    nodes = [start_node(work, repository, address) for address in (HEAD, WORKER)]
    for address in (HEAD, WORKER):
        wait_for(lambda a=address: listens(a, 22), f"an SSH server on {address}")
    facts: dict[str, Any] = {"decoys_before": running(work / "decoy" / "raylet")}
    try:
        ray("up", "--yes", "--no-config-cache", str(files))
        ray("exec", str(files), ". ~/rakv/ray.env && serve deploy ~/rakv/serve.yaml")
        facts |= ask()
        # Now that both nodes serve, `ray stop` has run on both: the head starts the worker later.
        facts["decoys_after_up"] = running(work / "decoy" / "raylet")
        ray("down", "--yes", str(files))
        # The head's is stopped, the worker's gives up when it has missed the head for a minute.
        wait_for(lambda: running(Path("raylet")) == 0, "no raylet runs")
        facts["raylets_after_down"] = running(Path("raylet"))
    finally:
        (work / "facts.json").write_text(json.dumps(facts))
        for node in nodes:
            node.kill()


def node(work: Path, repository: Path, address: str) -> None:
    """One machine: a process that `ray stop` takes for Ray's, and an SSH server."""
    own_folders(work, repository, address)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/sshd").mkdir(mode=0o755)
    subprocess.Popen([work / "decoy" / "raylet", "3600"])
    options = {
        "ListenAddress": address, "Port": 22, "HostKey": work / "host_key", "PidFile": "none",
        "AuthorizedKeysFile": work / "key.pub", "StrictModes": "no", "UsePAM": "no",
        "PermitRootLogin": "prohibit-password",
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin") or ""
    os.execv(sshd, [sshd, "-D", "-e", "-f", "/dev/null", *arguments])


def ask() -> dict[str, Any]:
    """Requests until both nodes' replicas have answered some; what they said of themselves."""
    url = f"http://{HEAD}:{PORT}"
    wait_for(lambda: answers(f"{url}/readyz"), "the service is ready")

    def chat(number: int) -> int:
        body = {
            "messages": [{"role": "user", "content": f"Question {number}"}],
            "max_tokens": 64, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).status_code

    statuses: list[int] = []
    busy: set[str] = set()

    def both_asked() -> bool:
        with ThreadPoolExecutor(12) as pool:
            statuses.extend(pool.map(chat, range(24)))
        # A replica that is late is left out of a scrape.
        busy.update(busy_replicas(url))
        return len(busy) == 2

    wait_for(both_asked, "both nodes' replicas were asked")
    return {"statuses": sorted(set(statuses)), "busy_replicas": sorted(busy)}


def busy_replicas(url: str) -> list[str]:
    """The ``replica`` labels under which a request was counted."""
    prefix = "rakv_engine_requests_total{"
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    counts = [line for line in lines if line.startswith(prefix)]
    return [x[len(prefix) :].split("}")[0] for x in counts if float(x.split()[-1]) > 0]


def write_files(work: Path, repository: Path) -> Path:
    """deploy/'s files with this place's addresses, paths and model; the cluster file's path.

    Replaced: addresses, user and key; the setup (the test's own environment stands in for the
    wheel and the fetched model); where the two proxies would share one loopback address, one.
    """
    deploy = repository / "deploy"
    cluster = yaml.safe_load((deploy / "ray-cluster.local.yaml").read_text())
    cluster["provider"] |= {"head_ip": HEAD, "worker_ips": [WORKER]}
    cluster["auth"] = {"ssh_user": pwd.getpwuid(os.getuid()).pw_name,
                       "ssh_private_key": str(work / "key")}  # fmt: skip
    setup = [command for command in cluster["setup_commands"] if "venv" not in command]
    cluster["setup_commands"] = [f"ln -sfn {sys.prefix} ~/rakv/venv", *setup]
    environment = (deploy / "ray.env").read_text()
    (work / "ray.env").write_text(environment + f"export PYTHONPATH={repository}\n")
    serve = yaml.safe_load((deploy / "serve.yaml").read_text())
    serve["proxy_location"] = "HeadOnly"
    serve["http_options"]["port"] = PORT
    (application,) = serve["applications"]
    application["args"] |= {
        "model": str(work / "model"), "threads": 1, "store_dir": "/tmp/store",
        "ram_budget_bytes": "64MiB", "disk_budget_bytes": "256MiB", "packed_budget_bytes": 0,
        "kv_budget_bytes": "64MiB",
    }  # fmt: skip
    (work / "serve.yaml").write_text(yaml.safe_dump(serve))
    (work / "ray-token").write_text(os.urandom(32).hex())
    cluster["file_mounts"] = {
        "~/rakv/ray.env": str(work / "ray.env"),
        "~/rakv/serve.yaml": str(work / "serve.yaml"),
        "~/rakv/ray-token": str(work / "ray-token"),
    }
    path = work / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def start_node(work: Path, repository: Path, address: str) -> subprocess.Popen[bytes]:
    script = [sys.executable, __file__, str(work), str(repository), address]
    with (work / f"node-{address}.log").open("wb") as log:
        return subprocess.Popen(
            ["unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc", *script],
            stdout=log, stderr=log,
        )  # fmt: skip


def own_folders(work: Path, repository: Path, name: str) -> None:
    """Cover /tmp and the home folder; what the test's own code needs of them stays visible."""
    keep = {work, repository, Path(sys.prefix), Path(sys.base_prefix)}
    for target in (Path("/tmp"), HOME):
        stage = work / "folders" / name / target.name
        stage.mkdir(parents=True)
        for path in sorted(keep):
            if path.is_relative_to(target):
                (stage / path.relative_to(target)).mkdir(parents=True, exist_ok=True)
                mount("--bind", path, stage / path.relative_to(target))
        mount("--rbind", stage, target)


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def loopback_up() -> None:
    request = struct.pack("16sh", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def ray(*arguments: str) -> None:
    subprocess.run([Path(sys.prefix) / "bin" / "ray", *arguments], check=True,
                   stdin=subprocess.DEVNULL, timeout=DEADLINE_S)  # fmt: skip


def running(program: Path) -> int:
    """Processes of this program in this PID namespace and those below it."""
    commands: list[Sequence[bytes]] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            commands.append((entry / "cmdline").read_bytes().split(b"\0"))
        except OSError:
            continue  # it has ended meanwhile
    name = os.fsencode(program)
    return sum(command[0] == name or command[0].endswith(b"/" + name) for command in commands)


def listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        node(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    main(Path(sys.argv[1]), Path(sys.argv[2]))
