"""The cache in an operator's hands, tenants' walls, and where requests go."""

from __future__ import annotations

from contextlib import ExitStack, closing

import httpx
import pytest

from rakv_cluster.errors import NotFound
from rakv_cluster.testing.surfaces import Surface

from .conftest import Cluster
from .test_generation import USER, chat

pytestmark = pytest.mark.cluster


def documents(surface: Surface, name: str) -> list[dict[str, str]]:
    """Texts that no other test asks about."""
    return [{"id": name, "text": f"{name} over {surface.name}.\n\n" * 60}]


def test_what_was_warmed_is_reused(surface: Surface) -> None:
    given = documents(surface, "warmed")

    usage = surface.cache("warm", messages=USER, documents=given)["usage"]
    reply = surface.ask(**chat(documents=given, max_tokens=1))

    assert usage["prompt_tokens"] == reply.usage.prompt_tokens
    assert reply.usage.cached_tokens > 0.8 * reply.usage.prompt_tokens


def test_a_document_left_here_is_named_by_id(
    surface: Surface, cluster: Cluster, views: ExitStack
) -> None:
    (document,) = documents(surface, "left")
    headers = {"Authorization": f"Bearer {cluster.keys['alpha']}"}
    left = httpx.post(f"{cluster.url}/v1/documents", json=document, headers=headers, timeout=60)
    assert left.status_code == 200, left.text

    by_id = surface.ask(**chat(documents=[{"id": document["id"]}]))
    by_text = surface.ask(**chat(documents=[document], reuse="off"))

    assert by_id.text == by_text.text
    assert by_id.usage.cached_tokens > 0.8 * by_id.usage.prompt_tokens
    beta = views.enter_context(closing(cluster.surface(surface.name, "beta")))
    with pytest.raises(NotFound) as caught:
        beta.ask(**chat(documents=[{"id": document["id"]}]))
    assert caught.value.field == "documents.0.id"


def test_one_cache_stands_behind_both_surfaces(surface: Surface, cluster: Cluster) -> None:
    given = documents(surface, "shared")
    surface.ask(**chat(documents=given, max_tokens=1))

    other = "grpc" if surface.name == "http" else "http"
    with closing(cluster.surface(other)) as view:
        usage = view.ask(**chat(documents=given, max_tokens=1)).usage

    assert usage.cached_tokens > 0.8 * usage.prompt_tokens


def test_a_route_is_explained_and_nothing_generated(surface: Surface, root: Surface) -> None:
    before = root.stats()["replica"]["engine_requests_total"]

    answer = surface.explain(**chat())

    assert answer["chosen"] in {line["replica"] for line in answer["replicas"]}
    assert answer["prompt_tokens"] == surface.ask(**chat(max_tokens=1)).usage.prompt_tokens
    for line in answer["replicas"]:
        terms = [value for name, value in line.items() if name.endswith("_ms")]
        assert all(value >= 0 for value in terms)
    assert root.stats()["replica"]["engine_requests_total"] == before + 1
