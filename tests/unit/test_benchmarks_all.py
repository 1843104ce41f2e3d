"""`benchmarks.all`: what it finds, and the page it writes from reports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import all as everything
from benchmarks.all import Ran, names, page, plot, run


def report(name: str, value: float, bound: float) -> dict[str, object]:
    header = {
        "benchmark": name, "commit": "c0ffee", "seed": 7, "time": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "system": "Linux"},
        "uncommitted_changes": True, "short": True,
    }  # fmt: skip
    wanted = {"name": "a ratio", "value": value, "relation": ">=", "bound": bound}
    return {"header": header, "results": {}, "requirements": [wanted | {"met": value >= bound}]}


def test_every_benchmark_is_found_and_has_a_main() -> None:
    found = names()

    assert {"ttft", "store", "engine", "routing", "soak", "peers"} <= set(found)
    assert not {"all", "common", "corpus", "soak_cluster", "peers_adapters"} & set(found)
    for name in found:
        assert callable(importlib.import_module(f"benchmarks.{name}").main)


def test_the_page_says_where_figures_are_from_and_what_was_missed() -> None:
    ran = [
        Ran("good", report("good", 2.0, 1.0), "{}\nok line", 0),
        Ran("bad", report("bad", 0.5, 1.0), "MISS line", 0),
        Ran("broken", {}, "Traceback", 1),
    ]

    text = page(ran)

    for part in ("a CPU, 2 cores", "seed: 7", "ok line", "`python -m benchmarks.good --short`",
                 "- a ratio: 0.5, must be >= 1",
                 "| [good](#good) | short | `c0ffee`+ | 2026-01-01T00:00:00+00:00 | a CPU, 2 "
                 "cores, 4.0 GiB | 1 of 1 |  |",
                 "did not finish (exit code 1)"):  # fmt: skip
        assert part in text
    assert "{}" not in text


def test_a_picture_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = [Ran("good", report("good", 2.0, 1.0), "", 0), Ran("broken", {}, "", 1)]

    assert plot(ran, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_a_benchmark_that_fails_is_reported_and_raises_nothing(tmp_path: Path) -> None:
    ran = run("no_such_benchmark", tmp_path, short=True)

    assert not ran.ok
    assert "No module named" in (tmp_path / "no_such_benchmark.txt").read_text()


def test_all_runs_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str, out: Path, *, short: bool) -> Ran:
        (out / f"{name}.json").write_text(json.dumps(report(name, 2.0, 1.0)))
        return Ran(name, report(name, 2.0, 1.0), f"figures of {name}", 0)

    monkeypatch.setattr(everything, "run", fake)

    code = everything.main(["--out", str(tmp_path), "--only", "ttft", "store"])

    assert code == 0
    assert "figures of store" in (tmp_path / "results.md").read_text()


def test_what_an_earlier_run_left_is_kept_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ttft.json").write_text(json.dumps(report("ttft", 2.0, 1.0)))
    (tmp_path / "ttft.txt").write_text("figures of before")
    asked: list[str] = []

    def fake(name: str, out: Path, *, short: bool) -> Ran:
        asked.append(name)
        return Ran(name, report(name, 2.0, 1.0), f"new figures of {name}", 0)

    monkeypatch.setattr(everything, "run", fake)
    arguments = ["--out", str(tmp_path), "--only", "ttft", "store"]

    everything.main([*arguments, "--resume"])
    kept = (tmp_path / "results.md").read_text()
    everything.main(arguments)

    assert asked == ["store", "ttft", "store"]
    assert "figures of before" in kept
    assert "new figures of store" in kept
    assert "figures of before" not in (tmp_path / "results.md").read_text()
