"""Two nodes: Ray Data asks from both (examples/ask_from_every_node.py), and texts that were left
with one ingress are known to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from fastapi import FastAPI
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rakv_cluster
from rakv_cluster.config import Settings
from rakv_cluster.errors import BodyTooLarge, NotFound, Unavailable
from rakv_cluster.serving.document_registry import LeftDocument
from rakv_cluster.serving.shared_documents import SharedDocuments
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app
from rakv_cluster.testing.waiting import eventually

# Workers on the nodes cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.cluster

ROOT = Path(rakv_cluster.__file__).parent.parent
DOCUMENTS, ROWS = 8, 64
BUDGET_BYTES = 10_000


@pytest.fixture
def url() -> Iterator[str]:
    def respond(prompt: str) -> str:
        return prompt.rpartition("number ")[2].partition("?")[0]

    async def build() -> FastAPI:
        return scripted_app(ScriptedBackend(respond), Settings(), ManualClock())

    with http_server(build) as url:
        yield url


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    node = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


def test_both_nodes_ask_and_rows_keep_their_answers(
    url: str, cluster: Cluster, tmp_path: Path
) -> None:
    # Neighbours in the file share no document.
    asked = [
        {"document": f"Document {row % DOCUMENTS}. " * 30, "question": f"Which is number {row}?"}
        for row in range(ROWS)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))

    done = subprocess.run(
        [sys.executable, "examples/ask_from_every_node.py", str(tmp_path / "questions.jsonl"),
         str(tmp_path / "answers"), "--url", url],
        cwd=ROOT, capture_output=True, text=True, timeout=480, check=False,
        env=os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted((tmp_path / "answers").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    questions = sorted((row["document"], row["question"]) for row in rows)
    assert questions == sorted((row["document"], row["question"]) for row in asked)
    for row in rows:
        assert f"number {row['text']}?" in row["question"]
        assert row["error"] == ""
    assert len({row["node"] for row in rows}) == 2
    # Of each document all rows but the first, however they were spread.
    assert sum(row["cached_tokens"] > 0 for row in rows) >= ROWS - DOCUMENTS


class Counting(SharedDocuments):
    """Knows how often it looked up its actor."""

    lookups = 0

    def _named(self) -> Any:
        self.lookups += 1
        return super()._named()


class Door:
    """An ingress's process: leaves and finds texts."""

    def __init__(self) -> None:
        self._documents = Counting(BUDGET_BYTES, service="test", namespace="rakv-test")

    async def lookups(self) -> int:
        return self._documents.lookups

    async def start(self) -> None:
        await self._documents.start()

    async def leave(self, tenant: str, name: str, text: str) -> None:
        await self._documents.leave(tenant, LeftDocument(name, text, created_s=1.0))

    async def text(self, tenant: str, name: str) -> str:
        return (await self._documents.get(tenant, name, "documents.0.id")).text

    async def names(self, tenant: str) -> list[str]:
        return [document.id for document in await self._documents.all(tenant)]

    async def remove(self, tenant: str, name: str) -> bool:
        return await self._documents.remove(tenant, name)


def call(method: Any, *given: object) -> Any:
    return ray.get(method.remote(*given), timeout=120)


@pytest.fixture
def doors(cluster: Cluster) -> Iterator[list[Any]]:
    """One on each node."""
    ray.init(address=cluster.address, namespace="rakv-test", log_to_driver=False)
    nodes = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes()]
    door = ray.remote(num_cpus=0)(Door)
    yield [door.options(scheduling_strategy=node).remote() for node in nodes]
    ray.shutdown()


def test_a_text_left_at_one_door_is_known_at_the_other_and_outlives_the_first(
    doors: list[Any],
) -> None:
    first, second = doors
    call(first.start)
    call(first.leave, "t", "a", "text")
    call(second.leave, "t", "b", "other")

    assert call(second.text, "t", "a") == "text"
    assert call(second.lookups) == 1
    ray.kill(first)
    assert call(second.names, "t") == ["b", "a"]
    assert call(second.names, "u") == []
    assert call(second.remove, "u", "a") is False
    assert call(second.remove, "t", "a") is True
    with pytest.raises(NotFound) as unknown:
        call(second.text, "t", "a")
    assert unknown.value.field == "documents.0.id"
    with pytest.raises(BodyTooLarge):
        call(second.leave, "t", "c", "x" * BUDGET_BYTES)


def test_a_registry_that_dies_is_replaced(doors: list[Any]) -> None:
    first, second = doors
    call(first.start)
    call(first.leave, "t", "d", "text")

    ray.kill(ray.get_actor("test-documents"), no_restart=True)

    def replaced() -> bool:
        """Who calls meanwhile is told to come again, and nothing else."""
        with suppress(Unavailable):
            return "d" not in call(second.names, "t")
        return False

    eventually(replaced, "another registry answers", timeout_s=120.0)

    def left() -> bool:
        with suppress(Unavailable):
            call(first.leave, "t", "e", "another")
            return True
        return False

    eventually(left, "the other door knows it too", timeout_s=120.0)
    assert call(second.text, "t", "e") == "another"
    assert call(first.lookups) > 1
