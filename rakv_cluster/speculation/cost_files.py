"""Where learned step costs are kept between a replica's lives."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from rakv_cluster.speculation.cost_model import CostBuckets, CostTable

FORMAT = 2


def machine_name() -> str:
    """This kind of machine: processor and number of usable cores. Not the host's name, which a
    container draws anew."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    processor = models[0] if models else platform.processor() or platform.machine()
    return f"{processor} x{len(os.sched_getaffinity(0))}"


@dataclass(frozen=True, slots=True)
class CostIdentity:
    """What measured costs hold for: anything that differs makes them someone else's."""

    machine: str
    model_digest: str
    numeric_class: str


def costs_path(cache_dir: Path, identity: CostIdentity) -> Path:
    """File of a machine's and model's costs in the cache folder."""
    name = f"{identity.machine}-{identity.model_digest[:16]}-{identity.numeric_class}"
    return cache_dir / "costs" / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"


def save_costs(path: Path, identity: CostIdentity, table: CostTable) -> None:
    """Write atomically; raises ``OSError`` where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "identity": asdict(identity), **table.to_json()})
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def load_costs(path: Path, identity: CostIdentity, buckets: CostBuckets) -> CostTable:
    """The saved table; an empty one if there is none, it is damaged, or it is for another model.

    A damaged file costs a self-benchmark, no more, so why it was refused is not reported.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] == FORMAT and data["identity"] == asdict(identity):
            return CostTable.from_json(data, buckets)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the empty table says it
    return CostTable(buckets)
