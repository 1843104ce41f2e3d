"""From `rakv calibrate` to a service that obeys the curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.reuse.calibration import Calibration, calibration_path, load_calibration
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing import chats
from rakv_cluster.testing.service import local_service
from rakv_cluster.testing.waiting import eventually

ASH, BIRCH, CEDAR = (
    {"id": name, "text": f"{name} {name}. " * 40} for name in ("ash", "birch", "cedar")
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(4):
        lines = [f"line {line} of text {number} says {line * number}\n" for line in range(40)]
        (folder / f"text{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, texts: Path) -> Path:
    """A cache folder in which the tiny model is calibrated."""
    folder = tmp_path_factory.mktemp("cache")
    result = CliRunner().invoke(
        app,
        ["calibrate", "--model", str(tiny_folder), "--texts", str(texts), "--prompts", "4",
         "--document-tokens", "16", "--cache-dir", str(folder)],
        env=same_threads(),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "4 of 4 prompts" in result.output
    return folder


def test_the_curve_is_kept_under_the_models_digest(
    cache: Path, texts: Path, tiny_model: LoadedModel
) -> None:
    kept = load_calibration(calibration_path(cache, tiny_model.card.digest))

    assert (kept.prompts, kept.texts) == (4, str(texts))
    assert kept.points[0].fraction == 0.0
    assert kept.points[0].kl > 0
    assert all(point.kl <= point.kl_p95_upper for point in kept.points)


def test_a_service_repairs_what_the_curve_asks_for(cache: Path, tiny_model: LoadedModel) -> None:
    kept = load_calibration(calibration_path(cache, tiny_model.card.digest))
    budgets = sorted({point.kl_p95_upper for point in kept.points if point.fraction < 0.6})
    settings = load_settings({"price_loads": False, "cache_dir": str(cache)}, environ={})
    store = MemoryStore(1 << 28, SystemClock())
    with (
        local_service(tiny_model, store, settings) as service,
        httpx.Client(base_url=service.url, timeout=60.0) as http,
    ):
        chats.reusing(lambda: ask(http, ASH, BIRCH))

        generous, none = (
            ask(http, BIRCH, ASH, reuse="blend", max_kl=budget)["rakv"]["blend"]
            for budget in (budgets[-1] * 1.01, budgets[0] * 0.5)
        )

    choice = kept.choose(budgets[-1] * 1.01)
    assert generous["approximate"]
    assert generous["repaired_fraction"] == pytest.approx(choice.fraction, abs=0.01)
    assert generous["expected_kl"] == pytest.approx(choice.expected_kl, abs=1e-4)
    assert "is not met" in none["refusal"]


def test_first_use_calibrates_in_idle_time(tmp_path: Path, tiny_model: LoadedModel) -> None:
    """Until that is done a bounded request is exact, and says so."""
    settings = load_settings(
        {"price_loads": False, "cache_dir": str(tmp_path), "calibration_prompts": 1}, environ={}
    )
    store = MemoryStore(1 << 28, SystemClock())
    with (
        local_service(tiny_model, store, settings) as service,
        httpx.Client(base_url=service.url, timeout=60.0) as http,
    ):
        chats.reusing(lambda: ask(http, ASH, BIRCH))

        def blended(*documents: dict[str, str]) -> dict[str, Any]:
            found: dict[str, Any] = ask(http, *documents, reuse="blend", max_kl=50.0)["rakv"]
            return found["blend"]

        first = blended(BIRCH, ASH)
        assert not first["approximate"]
        assert "not calibrated yet" in first["refusal"]
        path = calibration_path(tmp_path, tiny_model.card.digest)
        eventually(path.exists, "the calibration is kept", timeout_s=240.0)
        later = blended(CEDAR, ASH)

    assert later["refusal"] == ""
    assert later["approximate"]
    assert later["expected_kl"] == pytest.approx(load_calibration(path).points[0].kl, abs=1e-4)
    assert load_calibration(path).prompts == 1


def test_too_few_texts_are_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("short\n")

    result = CliRunner().invoke(
        app,
        ["calibrate", "--model", str(tiny_folder), "--texts", str(tmp_path)],
        env=same_threads(),
    )

    assert result.exit_code == 2
    assert load_calibration(tmp_path / "none.json") == Calibration()


def same_threads() -> dict[str, str]:
    """The command runs in this process, whose other tests go on with torch as it is."""
    return {"RAKV_THREADS": str(torch.get_num_threads())}


def ask(http: httpx.Client, *documents: dict[str, str], **fields: Any) -> dict[str, Any]:
    return chats.ask(http, documents=documents, max_tokens=4, **fields)
