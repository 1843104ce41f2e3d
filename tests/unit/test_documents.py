"""Documents that were left here and are named by id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.errors import BodyTooLarge, NotFound
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.document_api import add_document_routes
from rakv_cluster.serving.document_registry import DocumentRegistry, LeftDocument
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.keys import KeyTable, new_key, write_table
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

TEXT = "Line of a document.\n\n" * 40
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def serving(
    backend: ScriptedBackend, settings: Settings, key: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    service, metrics = scripted_service(backend, settings, ManualClock()), ServiceMetrics()
    shards = SimulatedShards([], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, tuple, ManualClock())
    app = create_app(service, metrics)
    add_document_routes(app, service, CacheApi(service, metrics, admin))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://service", headers=headers
    ) as http:
        yield http


async def test_what_is_wrong_with_a_document_is_named_as_it_was_sent() -> None:
    settings = Settings(body_limit_bytes=ByteSize(1 << 25))
    async with serving(ScriptedBackend(), settings) as http:
        long = await http.post("/v1/documents", json={"id": "a", "text": "x" * (13 << 20)})

    error = long.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "text")


def question(*documents: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "What is it?"}],
        "documents": list(documents),
    } | fields


async def test_a_document_is_computed_once_and_then_named_by_id() -> None:
    backend = ScriptedBackend()
    async with serving(backend, Settings()) as http:
        left = (await http.post("/v1/documents", json={"id": "a/b", "text": TEXT})).json()
        by_id = await http.post(CHAT, json=question({"id": "a/b"}))
        by_text = await http.post(CHAT, json=question({"id": "a/b", "text": TEXT}))

    assert (left["id"], left["object"], left["characters"]) == ("a/b", "document", len(TEXT))
    usage = by_id.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * len(TEXT)
    prompts = [replace(request, request_id="").prompt for request in backend.requests[1:]]
    assert prompts[0] == prompts[1]
    assert by_text.json()["usage"]["prompt_tokens"] == usage["prompt_tokens"]


async def test_a_system_message_in_front_is_part_of_what_is_computed() -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "?"}
    async with serving(ScriptedBackend(), Settings()) as http:
        left = {"id": "d", "text": TEXT, "system": system["content"]}
        await http.post("/v1/documents", json=left)
        body = question({"id": "d"}, messages=[system, user])
        usage = (await http.post(CHAT, json=body)).json()["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * len(TEXT)


async def test_documents_are_listed_shown_replaced_and_forgotten() -> None:
    async with serving(ScriptedBackend(), Settings()) as http:
        await http.post("/v1/documents", json={"id": "a", "text": "one"})
        await http.post("/v1/documents", json={"id": "a", "text": "other"})
        listed = (await http.get("/v1/documents")).json()
        shown = (await http.get("/v1/documents/a")).json()
        gone = (await http.delete("/v1/documents/a")).json()
        statuses = [
            (await http.get("/v1/documents/a")).status_code,
            (await http.delete("/v1/documents/a")).status_code,
        ]
        unknown = await http.post(CHAT, json=question({"text": "x"}, {"id": "a"}))

    assert listed["data"] == [shown]
    assert (shown["characters"], gone["deleted"]) == (5, True)
    assert statuses == [404, 404]
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "documents.1.id"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": "x"}, "id"),
        ({"id": "", "text": "x"}, "id"),
        ({"id": "x" * 513, "text": "x"}, "id"),
        ({"id": 5, "text": "x"}, "id"),
        ({"id": "a"}, "text"),
        ({"id": "a", "text": ""}, "text"),
        ({"id": "a", "text": "x", "system": 1}, "system"),
        ({"id": "a", "text": "x", "tenant": "other"}, "tenant"),
    ],
)
async def test_a_mistake_is_named(body: dict[str, Any], field: str) -> None:
    async with serving(ScriptedBackend(), Settings()) as http:
        refused = await http.post("/v1/documents", json=body)

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field


async def test_a_document_whose_kv_could_not_be_computed_is_not_left() -> None:
    async with serving(ScriptedBackend(), Settings(documents_budget_bytes=2000)) as http:
        refused = await http.post("/v1/documents", json={"id": "a", "text": "x" * 3000})
        assert refused.status_code == 413
        assert (await http.get("/v1/documents")).json()["data"] == []


async def test_tenants_do_not_see_each_others_documents(tmp_path: Path) -> None:
    made = {name: new_key(name, admin=False) for name in ("alpha", "beta")}
    write_table(tmp_path / "keys", KeyTable({entry.id: entry for _, entry in made.values()}))
    settings = Settings(api_keys_file=tmp_path / "keys")
    async with serving(ScriptedBackend(), settings) as http:
        alpha, beta = ({"Authorization": f"Bearer {made[n][0]}"} for n in ("alpha", "beta"))
        await http.post("/v1/documents", json={"id": "a", "text": TEXT}, headers=alpha)

        listed = (await http.get("/v1/documents", headers=beta)).json()["data"]
        asked = await http.post(CHAT, json=question({"id": "a"}), headers=beta)
        removed = await http.delete("/v1/documents/a", headers=beta)
        kept = await http.post(CHAT, json=question({"id": "a"}), headers=alpha)

    assert (listed, asked.status_code, removed.status_code) == ([], 404, 404)
    assert kept.status_code == 200


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["leave", "get", "remove"]),
            st.sampled_from(["t", "u"]),
            st.sampled_from("abcd"),
            st.integers(0, 4000),
        ),
        max_size=40,
    )
)
def test_the_registry_keeps_the_last_used_within_its_budget(
    steps: list[tuple[str, str, str, int]],
) -> None:
    budget = 8000
    registry = DocumentRegistry(budget)
    model: dict[str, dict[str, str]] = {"t": {}, "u": {}}  # in the order of use
    for kind, tenant, name, size in steps:
        kept = model[tenant]
        if kind == "leave":
            registry.leave(tenant, LeftDocument(name, "x" * size, 0.0))
            kept.pop(name, None)
            kept[name] = "x" * size
            while sum(len(text) + 1025 for text in kept.values()) > budget:
                kept.pop(next(iter(kept)))
        elif kind == "get" and name in kept:
            assert registry.get(tenant, name).text == kept[name]
            kept[name] = kept.pop(name)
        elif kind == "get":
            with pytest.raises(NotFound):
                registry.get(tenant, name)
        else:
            assert registry.remove(tenant, name) == (kept.pop(name, None) is not None)
        for each, texts in model.items():
            assert [d.id for d in registry.all(each)] == list(texts)


def test_what_is_larger_than_the_budget_changes_nothing() -> None:
    registry = DocumentRegistry(3000)
    registry.leave("t", LeftDocument("a", "x", 0.0))

    with pytest.raises(BodyTooLarge):
        registry.leave("t", LeftDocument("a", "x" * 3000, 0.0))

    assert registry.get("t", "a").text == "x"
