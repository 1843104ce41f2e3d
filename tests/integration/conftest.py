"""A tiny model, and services around it: in this process, or as ``rakv serve`` on a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.service import LocalService, StartLocal, local_service
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a model folder; its text is noise, its tokens are bytes."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tiny_llama(layers=4))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder))


@pytest.fixture(scope="module")
def start_local(tiny_model: LoadedModel) -> Iterator[StartLocal]:
    """Start services in this process with settings of one's own; they end with the module."""
    with ExitStack() as services:

        def start(**flags: object) -> LocalService:
            # Whether loading pays off is a matter of time for a model this small: not priced here.
            given = {"price_loads": False, "calibration_prompts": 0, **flags}
            settings = load_settings(given, environ={})
            store = MemoryStore(1 << 28, SystemClock())
            return services.enter_context(local_service(tiny_model, store, settings))

        yield start


@pytest.fixture(scope="module")
def local(start_local: StartLocal) -> LocalService:
    return start_local()


@pytest.fixture(scope="module")
def http(local: LocalService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=local.url, timeout=60.0) as client:
        yield client


@pytest.fixture
def fresh(start_local: StartLocal) -> Iterator[httpx.Client]:
    """A client of a service that nobody has asked anything."""
    with httpx.Client(base_url=start_local().url, timeout=60.0) as client:
        yield client
