"""The built wheel is complete: it runs from a folder that has nothing else of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "rakv_cluster"):
        (source / name).symlink_to(REPOSITORY / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_every_module_the_kernels_and_the_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for suffix in (".py", ".c", ".h"):
        files = (REPOSITORY / "rakv_cluster").rglob(f"*{suffix}")
        assert {str(path.relative_to(REPOSITORY)) for path in files} <= names
    assert "rakv_cluster/py.typed" in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(
        [sys.executable, "-m", "rakv_cluster.cli", "--version"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert wheel.name.split("-")[1] in result.stdout
