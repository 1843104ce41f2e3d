"""What every benchmark shares: options, a header that says where figures come from, requirements.

A benchmark computes a dictionary of results and a list of :class:`Requirement`, and hands both to
:func:`finish`. ``--short`` runs a smaller version for CI, ``--json F`` writes everything to a file,
``--check`` makes an unmet requirement the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("numpy", "torch", "ray", "transformers", "lmdb", "zstandard")


@dataclass(frozen=True, slots=True)
class Options:
    """Command line of a benchmark."""

    short: bool
    check: bool
    json_path: Path | None
    seed: int


@dataclass(frozen=True, slots=True)
class Requirement:
    """A figure that must be on one side of a bound."""

    name: str
    value: float
    relation: Literal[">=", "<="]
    bound: float

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side."""
        return self.value >= self.bound if self.relation == ">=" else self.value <= self.bound


def parse_options(
    description: str,
    argv: Sequence[str] | None = None,
    *,
    extra: argparse.ArgumentParser | None = None,
) -> tuple[Options, argparse.Namespace]:
    """The common options, and the namespace that also holds those of ``extra``."""
    parser = argparse.ArgumentParser(
        description=description, parents=[extra] if extra else [],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--short", action="store_true", help="a smaller run, for CI")
    parser.add_argument("--check", action="store_true", help="exit 1 if a requirement is not met")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--seed", type=int, default=1, help="of everything random")
    names = parser.parse_args(argv)
    return Options(names.short, names.check, names.json, names.seed), names


def shared_data() -> Path:
    """The folder with shared data sets: ``$RAKV_SHARED`` or ``../shared`` of the checkout.

    It need not be there: who uses it generates other data then, or asks :func:`required_data`.
    """
    return Path(os.environ.get("RAKV_SHARED", ROOT.parent / "shared")) / "data"


def required_data(name: str) -> Path:
    """A file or folder of :func:`shared_data`; ends the benchmark if it is not there."""
    path = shared_data() / name
    if not path.exists():
        raise SystemExit(f"this benchmark needs {path}; set RAKV_SHARED")
    return path


def time_s(work: Callable[[], object], *, rounds: int, warm: int = 1) -> list[float]:
    """Wall seconds of each round, after ``warm`` rounds that do not count."""
    for _ in range(warm):
        work()
    durations: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return durations


def header(options: Options) -> dict[str, Any]:
    """Machine, versions, commit, seed and time of a run."""
    return {
        "benchmark": Path(sys.argv[0]).stem,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(_memory_bytes() / 2**30, 1),
            "system": platform.platform(),
            "load_average": os.getloadavg()[0],
        },
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "seed": options.seed,
        "short": options.short,
    }


def finish(
    options: Options, results: Mapping[str, Any], requirements: Sequence[Requirement] = ()
) -> int:
    """Print provenance and requirements, write the report, return the exit status."""
    provenance = header(options)
    print(json.dumps(provenance))
    for requirement in requirements:
        mark = "ok  " if requirement.met else "MISS"
        print(
            f"{mark} {requirement.name}: {requirement.value:.4g} "
            f"(must be {requirement.relation} {requirement.bound:g})"
        )
    if options.json_path is not None:
        report = {
            "header": provenance,
            "results": results,
            "requirements": [{**asdict(one), "met": one.met} for one in requirements],
        }
        options.json_path.parent.mkdir(parents=True, exist_ok=True)
        options.json_path.write_text(json.dumps(report, indent=2) + "\n")
    return int(options.check and not all(requirement.met for requirement in requirements))


def table(rows: Sequence[Sequence[object]], headings: Sequence[str]) -> str:
    """Rows in aligned columns, numbers with three decimals."""
    cells = [[*headings]] + [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
