"""docs/security.md's claims about our own code that reading the source can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rakv_cluster

PACKAGE = Path(rakv_cluster.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
CODE_IN_DATA = frozenset(
    {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
)
CALLS = frozenset({"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"})


def forbidden(source: str) -> Iterator[str]:
    """What in a module could run code that data bring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in CODE_IN_DATA)
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0], *(a.name for a in node.names)}
            yield from sorted(names & CODE_IN_DATA)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                yield name
            for keyword in node.keywords:
                if keyword.arg in {"trust_remote_code", "allow_pickle", "shell"} and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield f"{name}({keyword.arg}=...)"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_runs_code_that_data_bring(path: Path) -> None:
    assert list(forbidden(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from ray import cloudpickle", "import torch\ntorch.load(f)", "eval('1')",
     "np.load(f, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=flag)"],
)  # fmt: skip
def test_what_is_looked_for_is_found(source: str) -> None:
    assert list(forbidden(source))
