"""Three Ray nodes on this machine with the service on them, and ways to break them.

Each node has a shard's folder of its own; the last node's is a small file system of its own where
this process may mount one, so that its disk can be filled. The head has the proxy and the Ingress,
and is not killed: who loses the head of a Ray cluster without external GCS storage loses the
cluster.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import ray
import yaml
from ray.cluster_utils import Cluster

from benchmarks.common import ROOT
from rakv_cluster.cli.local_service import free_port
from rakv_cluster.testing.processes import command, descendants

NODES = ("n0", "n1", "n2")
DISK_BYTES = 96 << 20
_CLONE_NEWNS = 0x20000
_MAGIC = b"RKV1"
_FAST_FAILURE_DETECTION = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
}


class Chaos:
    """What can be done to the cluster; each method says what it did, or why it could not."""

    def __init__(self, folder: Path, random: Random, *, own_disk: bool) -> None:
        self._folder = folder
        self._random = random
        self._own_disk = own_disk
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args=_arguments(NODES[0])
            | {"resources": {"head": 1}, "_system_config": _FAST_FAILURE_DETECTION},
        )
        self._raylets = {name: self.cluster.add_node(**_arguments(name)) for name in NODES[1:]}
        self._stalled: list[int] = []

    @property
    def actions(self) -> dict[str, Callable[[], str]]:
        """All of them, by name."""
        return {
            "kill a replica": lambda: self._kill(":Worker"),
            "kill a shard": lambda: self._kill("ShardActor"),
            "corrupt records": self._corrupt,
            "stall a shard and its part of the directory": self._stall,
            "fill a disk": self._fill,
            "kill a node": self._kill_node,
        }

    def heal(self) -> None:
        """End what lasts: stalls, a full disk, a missing node."""
        for pid in self._stalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stalled.clear()
        (self._folder / NODES[-1] / "filler").unlink(missing_ok=True)
        for name in NODES[1:]:
            if name not in self._raylets:
                self._raylets[name] = self.cluster.add_node(**_arguments(name))

    def resident_bytes(self, title: str) -> list[int]:
        """Memory of each process whose title contains ``title``."""
        page = os.sysconf("SC_PAGE_SIZE")
        found = []
        for pid in _titled(title):
            with contextlib.suppress(OSError):
                found.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page)
        return found

    def _kill(self, title: str) -> str:
        pids = _titled(title)
        if not pids:
            return "none was running"
        pid = self._random.choice(sorted(pids))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"killed {pid}"

    def _stall(self) -> str:
        pids = _titled("ShardActor")
        if not pids:
            return "none was running"
        pid = self._random.choice(sorted(pids))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stalled.append(pid)
        return f"stopped {pid}"

    def _corrupt(self) -> str:
        """Flip bytes inside stored records, in the live file of one shard.

        Behind the record's magic, not anywhere: a page of LMDB's own tree that another process
        damages under a running writer is not a fault that the store claims to survive.
        """
        files = sorted(self._folder.glob("n*/gen-*/data.mdb"))
        if not files:
            return "no shard has a file"
        path = self._random.choice(files)
        content = path.read_bytes()
        starts = [at for at in _all(content, _MAGIC) if at + 400 < len(content)]
        chosen = self._random.sample(starts, min(len(starts), 20))
        with path.open("r+b") as file:
            for start in chosen:
                at = start + self._random.randrange(8, 300)
                file.seek(at)
                file.write(bytes([content[at] ^ 0x40]))
        return f"flipped a byte in {len(chosen)} records of {path.parent.parent.name}"

    def _fill(self) -> str:
        if not self._own_disk:
            return "skipped: no mount of its own permitted here"
        written = 0
        filler = (self._folder / NODES[-1] / "filler").open("wb", buffering=0)
        with filler, contextlib.suppress(OSError):
            while True:
                written += filler.write(bytes(1 << 20))
        return f"filled {NODES[-1]}'s disk with {written >> 20} MiB"

    def _kill_node(self) -> str:
        if not self._raylets:
            return "none was there"
        name = self._random.choice(sorted(self._raylets))
        self.cluster.remove_node(self._raylets.pop(name), allow_graceful=False)
        return f"killed {name}"


@contextlib.contextmanager
def service(
    chaos: Chaos, folder: Path, model: str, settings: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """deploy/serve.yaml on the cluster by `serve run`; its URL and its gRPC target."""
    port, grpc_port = free_port(), free_port()
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    config["proxy_location"] = "HeadOnly"
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] |= settings | {
        "model": model, "store_dir": str(folder), "threads": 1, "grpc_port": grpc_port,
        "replicas": len(NODES),
    }  # fmt: skip
    by_name = {deployment["name"]: deployment for deployment in application["deployments"]}
    on_head = {"num_cpus": 0, "resources": {"head": 0.01}}
    by_name["Ingress"] |= {"num_replicas": 1, "ray_actor_options": on_head}
    by_name["Worker"]["num_replicas"] = len(NODES)
    path = folder.parent / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    run = [Path(sys.executable).with_name("serve"), "run", "-a", chaos.cluster.address, path]
    with (folder.parent / "serve.log").open("wb") as log:
        process = subprocess.Popen(run, stdout=log, stderr=log, cwd=ROOT)
        try:
            yield f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}"
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(90)
            process.kill()
            process.wait()


def own_disk(folder: Path) -> bool:
    """Give ``folder`` a small file system that only this process and its children see, and that
    goes with them; whether that is permitted."""
    folder.mkdir(parents=True)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return False
    for arguments in (
        ["--make-rprivate", "/"],
        ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)],
    ):
        if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
            return False
    return True


def release_disk(folder: Path) -> None:
    """End what :func:`own_disk` mounted, if it did."""
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def stop(chaos: Chaos) -> None:
    """End the cluster."""
    chaos.heal()
    if ray.is_initialized():
        ray.shutdown()
    chaos.cluster.shutdown()


def _arguments(name: str) -> dict[str, Any]:
    return {"num_cpus": 1, "labels": {"rakv-shard": name}, "include_dashboard": False}


def _titled(title: str) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if title in command(pid)]


def _all(content: bytes, part: bytes) -> Iterator[int]:
    at = content.find(part)
    while at >= 0:
        yield at
        at = content.find(part, at + 1)
