"""scripts/audit does not call "nothing was checked" "nothing is known"."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {"name": "a", "version": "1", "vulns": []}
KNOWN = {"name": "b", "version": "1", "vulns": [{"id": "PYSEC-1"}]}
SKIPPED = {"name": "c", "skip_reason": "not found"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("audit", str(ROOT / "scripts" / "audit"))
    spec = importlib.util.spec_from_loader("audit", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("dependencies", "status"),
    [([CLEAN], 0), ([CLEAN, KNOWN], 1), ([CLEAN, SKIPPED], 3), ([KNOWN, SKIPPED], 1), ([], 3)],
)
def test_the_exit_status_says_what_was_found_and_what_was_not_looked_at(
    audit: ModuleType, dependencies: list[dict[str, object]], status: int
) -> None:
    assert audit.verdict(dependencies) == status


def test_every_dependency_is_bounded_by_the_versions_that_are_tested() -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert all("==" in line for line in pinned if line and not line.startswith("#"))
