"""Two nodes: texts that were left with one ingress are known to another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rakv_cluster.errors import BodyTooLarge, NotFound
from rakv_cluster.serving.document_registry import LeftDocument
from rakv_cluster.serving.shared_documents import SharedDocuments

# Workers on the nodes cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.cluster

BUDGET_BYTES = 10_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    node = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


class Door:
    """An ingress's process: leaves and finds texts."""

    def __init__(self) -> None:
        self._documents = SharedDocuments(BUDGET_BYTES, service="test", namespace="rakv-test")

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
    call(first.leave, "t", "a", "text")
    call(second.leave, "t", "b", "other")

    assert call(second.text, "t", "a") == "text"
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
