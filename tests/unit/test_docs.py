"""The documentation builds without a warning, and what it links to is there.

Links to other sites are not followed: tests have no network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rakv_cluster

ROOT = Path(rakv_cluster.__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A path of this repository in code or prose, such as `deploy/serve.yaml`.
NAMED = re.compile(
    r"(?<![\w/.~-])((?:benchmarks|deploy|docs|examples|protos|scripts|tests)/[\w./-]*\w)(?=[\s`,;:.)|]|$)"
)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "site" / "operations" / "index.html").exists()


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[gone](gone.md) [part](#nowhere)\n")

    done = build(tmp_path, tmp_path / "site")

    assert done.returncode != 0
    assert "gone.md" in done.stderr


def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build(ROOT, tmp_path / "site")
    page = (tmp_path / "site" / "operations" / "index.html").read_text()

    loaded = re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["'](https?://[^"']+)""", page)
    assert loaded == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    local = [target for target in targets if "://" not in target and ":" not in target]

    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "operations.md", ROOT / "docs" / "security.md"],
    ids=lambda p: p.name,
)  # fmt: skip
def test_files_that_are_named_are_there(page: Path) -> None:
    named = {path.rstrip("/") for path in NAMED.findall(page.read_text())}

    assert named
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
