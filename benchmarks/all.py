"""Every benchmark in short form: JSON, tables, a picture, and a page of results.

    python -m benchmarks.all [--out DIR] [--only NAME ...] [--full] [--resume]
        [--page docs/results.md]

A benchmark is a module of this package that has a ``main`` and takes ``--json``. Each runs in a
process of its own, one after the other; one that fails is reported and the others go on. DIR gets
NAME.json, NAME.txt (what it printed), requirements.png and results.md (machine, commit, seed, what
each printed, which requirements held). With --resume, what DIR has of an earlier run is taken as it
is, in whichever form it ran. The exit status is 1 if one did not run.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

_TIMEOUT_S = 3600.0
_KEPT_LINES = 60


@dataclass(frozen=True, slots=True)
class Ran:
    """A benchmark's run: its report (empty if it wrote none), output and exit code."""

    name: str
    report: dict[str, Any]
    output: str
    code: int

    @property
    def ok(self) -> bool:
        """Whether it came to its end."""
        return self.code == 0 and bool(self.report)


def names() -> list[str]:
    """Benchmarks of this package, by what their files define."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text()
        functions = {node.name for node in ast.parse(source).body
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        if "main" in functions and "parse_options" in source and path.stem != "all":
            found.append(path.stem)
    return found


def run(name: str, out: Path, *, short: bool) -> Ran:
    """Run one; never raises for what the benchmark does."""
    report_path = out / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(report_path)]
    if short:
        command.append("--short")
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = f"not done after {error.timeout:.0f} s", -1
    (out / f"{name}.txt").write_text(output)
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    return Ran(name, report, output, code)


def earlier(name: str, out: Path) -> Ran | None:
    """What an earlier run left in ``out``, if it came to its end."""
    report_path, text_path = out / f"{name}.json", out / f"{name}.txt"
    if not (report_path.exists() and text_path.exists()):
        return None
    return Ran(name, json.loads(report_path.read_text()), text_path.read_text(), 0)


def page(ran: Sequence[Ran]) -> str:
    """The page of results, in Markdown."""
    first = next((one.report["header"] for one in ran if one.report), {})
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.all --page docs/results.md`; do not edit. Short forms "
        "show that a benchmark works; full forms are what to quote.",
        "",
        f"- seed: {first.get('seed')}",
        "",
        "| benchmark | form | commit | time | machine | requirements held | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in ran:
        wanted = one.report.get("requirements", [])
        held = sum(x["met"] for x in wanted)
        state = "" if one.ok else f"did not finish (exit code {one.code})"
        header = one.report.get("header", {})
        commit = f"`{header.get('commit', '')[:7]}`" + "+" * bool(header.get("uncommitted_changes"))
        lines.append(
            f"| [{one.name}](#{one.name}) | {_form(one)} | {commit} | {header.get('time', '')} "
            f"| {_machine(header.get('machine', {}))} | {held} of {len(wanted)} | {state} |"
        )
    for one in ran:
        lines += [
            "",
            f"## {one.name}",
            "",
            f"`python -m benchmarks.{one.name}{' --short' * (_form(one) == 'short')}`",
        ]
        missed = [x for x in one.report.get("requirements", []) if not x["met"]]
        if missed:
            lines += ["", "Not met:", ""]
            lines += [
                f"- {x['name']}: {x['value']:.4g}, must be {x['relation']} {x['bound']:g}"
                for x in missed
            ]
        shown = [x for x in one.output.splitlines() if not x.startswith("{")][-_KEPT_LINES:]
        lines += ["", "```text", *shown, "```"]
    return "\n".join(lines) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB"


def _form(one: Ran) -> str:
    return "short" if one.report.get("header", {}).get("short") else "full"


def plot(ran: Sequence[Ran], path: Path) -> bool:
    """How far each figure is on the right side of its bound; whether matplotlib is there."""
    try:
        import matplotlib  # noqa: PLC0415  # the `bench` extra
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415  # the `bench` extra

    figures = [
        (f"{one.name}: {x['name']}"[:70], _margin(x), x["met"])
        for one in ran
        for x in one.report.get("requirements", [])
    ]
    if not figures:
        return False
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.25 * len(figures)))
    labels, margins, met = zip(*figures, strict=True)
    axes.barh(range(len(figures)), margins, color=["#157a4a" if ok else "#b3261e" for ok in met])
    axes.set_yticks(range(len(figures)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times the bound, in the direction that is wanted (1 = just held; cut at 10)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _margin(requirement: dict[str, Any]) -> float:
    """1 on the bound, more on its right side; between 0 and 10."""
    value, bound = requirement["value"], requirement["bound"]
    if requirement["relation"] == "<=":
        value, bound = bound, value
    if bound <= 0:
        return 10.0 if requirement["met"] else 0.0
    return min(max(value / bound, 0.0), 10.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all; 1 if one did not finish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=names(), help="these alone")
    parser.add_argument("--full", action="store_true", help="long forms: hours")
    parser.add_argument("--resume", action="store_true", help="keep what DIR has already")
    parser.add_argument("--page", type=Path, metavar="F", help="write the page there too")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    ran = []
    for name in options.only or names():
        print(f"{name} ...", flush=True)
        done = earlier(name, options.out) if options.resume else None
        ran.append(done or run(name, options.out, short=not options.full))
        wanted = ran[-1].report.get("requirements", [])
        held = f"{sum(x['met'] for x in wanted)} of {len(wanted)} requirements held"
        print(f"{name}: {held if ran[-1].ok else f'did not finish, see {options.out / name}.txt'}")
    text = page(ran)
    (options.out / "results.md").write_text(text)
    if options.page:
        options.page.write_text(text)
    if not plot(ran, options.out / "requirements.png"):
        print("no picture: matplotlib is not installed (the bench extra)")
    return int(not all(one.ok for one in ran))


if __name__ == "__main__":
    sys.exit(main())
