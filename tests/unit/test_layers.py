"""Modules import only downwards, in the order of DESIGN.md section 2."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rakv_cluster

PACKAGE = Path(rakv_cluster.__file__).parent
ORDER = [
    "errors", "types", "clock", "logs", "config", "telemetry", "rpc",
    "chunking", "kv", "store", "model", "reuse", "speculation", "engine",
    "cluster", "routing", "serving", "client", "batch", "cli", "testing",
]  # fmt: skip


def layer_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_layers(source: str) -> Iterator[str]:
    """Top-level parts of rakv_cluster that a module's source imports, at any depth."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "rakv_cluster" and len(parts) > 1 and parts[1] in ORDER:
                yield parts[1]


def violations(layer: str, source: str) -> list[str]:
    """Imports of ``source`` that do not point downwards from ``layer``."""
    rank = ORDER.index(layer)
    return [other for other in imported_layers(source) if ORDER.index(other) > rank]


SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if layer_of(p) != "__init__")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    assert violations(layer_of(path), path.read_text()) == []


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer_of(path) for path in SOURCES} <= set(ORDER)


def test_an_upward_import_is_found() -> None:
    source = "def f():\n    from rakv_cluster.engine.request import EngineRequest\n"
    assert violations("store", source) == ["engine"]
    assert violations("serving", source) == []


def test_nothing_imports_the_test_fakes() -> None:
    users = [p for p in SOURCES if "testing" in imported_layers(p.read_text())]
    assert [p for p in users if layer_of(p) != "testing"] == []
