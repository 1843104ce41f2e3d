"""Cache operations, tokenization and prompts as token ids over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.errors import StoreUnavailable
from rakv_cluster.kv.codec import encode
from rakv_cluster.serving.admin_api import add_cache_routes
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.keys import KeyTable, new_key, write_table
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.records import tiny_record
from rakv_cluster.testing.scripted import CARD, ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards
from rakv_cluster.types import ReuseMode

NODES = ("n0", "n1")
CHAT = {
    "messages": [{"role": "user", "content": "q"}],
    "documents": [{"id": "d", "text": "Line of a document.\n\n" * 40}],
}


class Served:
    """The application over a scripted backend and simulated shards."""

    def __init__(
        self,
        settings: Settings,
        members: Callable[[], tuple[str, ...]] = lambda: NODES,
        *,
        backend: ScriptedBackend | None = None,
        **limits: float,
    ) -> None:
        self.backend = backend or ScriptedBackend()
        self.shards = SimulatedShards(NODES, ManualClock(), np.random.default_rng(0))
        service = scripted_service(self.backend, settings, ManualClock())
        metrics = ServiceMetrics()
        admin = StoreAdmin(self.shards, members, ManualClock())
        app = create_app(service, metrics)
        add_cache_routes(app, CacheApi(service, metrics, admin, **limits), settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://service")

    async def post(self, path: str, body: dict[str, Any], key: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=body, headers=headers)

    async def done(self, path: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
        response = await self.post(path, body, key)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def store_last_prompt(self, node: str) -> int:
        """Put records of the prompt that the backend saw last on a node; how many."""
        chunks = self.backend.requests[-1].prompt.chunks
        for number, chunk in enumerate(chunks):
            self.shards.hold(node, encode(replace(tiny_record(number), key=chunk.prefix_key)))
        return len(chunks)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served(Settings(body_limit_bytes=100_000))
    yield served
    await served.http.aclose()


async def assert_refused(response: httpx.Response, status: int, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    return str(response.json()["error"]["message"])


async def test_a_prompt_is_warmed_found_pinned_and_removed(served: Served) -> None:
    warmed = await served.done("/v1/cache/warm", CHAT)
    chunks = served.store_last_prompt("n1")

    found = await served.done("/v1/cache/lookup", CHAT)
    pinned = await served.done("/v1/cache/pin", CHAT | {"owner": "me", "ttl_s": 60})
    ended = await served.done("/v1/cache/unpin", CHAT | {"owner": "me"})
    stats = (await served.http.get("/v1/cache/stats")).json()
    removed = await served.done("/v1/cache/evict", CHAT)

    assert warmed["usage"]["completion_tokens"] == 1
    assert [chunk["nodes"] for chunk in found["chunks"]] == [["n1"]] * chunks
    assert found["stored_tokens"] == found["chunks"][-1]["end"]
    assert pinned == {"pinned_chunks": chunks, "prompt_chunks": chunks}
    assert ended == {"ended_pins": chunks}
    assert stats["shards_by_node"]["n1"]["records"] == chunks
    assert removed == {"removed_records": chunks}
    assert (await served.done("/v1/cache/lookup", CHAT))["stored_tokens"] == 0
    again = await served.done("/v1/chat/completions", CHAT)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("default", ["off", "blend"])
async def test_what_is_warmed_is_stored_whatever_requests_do_by_default(default: str) -> None:
    served = Served(Settings(default_reuse=ReuseMode(default)))

    await served.done("/v1/cache/warm", CHAT)

    assert served.backend.requests[-1].reuse is ReuseMode.EXACT
    await served.http.aclose()


async def test_a_warmed_prompt_is_no_example_of_how_long_answers_are(served: Served) -> None:
    await served.done("/v1/chat/completions", CHAT)
    await served.done("/v1/cache/warm", CHAT)

    # Lengths, by which requests are routed, are learned by endpoint.
    assert [request.endpoint for request in served.backend.requests] == ["chat", "warm"]


async def test_a_node_is_drained_before_it_is_removed(served: Served) -> None:
    await served.done("/v1/cache/warm", CHAT)
    chunks = served.store_last_prompt("n1")

    drained = await served.done("/v1/cache/drain", {"node": "n1"})

    assert drained == {"copied": chunks, "left": 0, "elsewhere": 0}
    assert len(served.shards.records["n0"]) == chunks


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "node"),
        ({"node": 3}, "node"),
        ({"node": "n7"}, "node"),
        ({"node": "n1", "deadline_s": 0}, "deadline_s"),
        ({"node": "n1", "deadline_s": True}, "deadline_s"),
        ({"node": "n1", "limit_bytes": -1}, "limit_bytes"),
        ({"node": "n1", "limit_bytes": "1GiB"}, "limit_bytes"),
        ({"node": "n1", "deadline": 3}, "deadline"),
    ],
)
async def test_a_drain_with_a_wrong_field_names_it(
    served: Served, body: dict[str, Any], field: str
) -> None:
    await assert_refused(await served.post("/v1/cache/drain", body), 400, field)


async def test_a_drain_from_or_to_nowhere_says_so(served: Served) -> None:
    alone = Served(Settings(), members=lambda: ("n1",))

    unknown = await assert_refused(
        await served.post("/v1/cache/drain", {"node": "n7"}), 400, "node"
    )
    nowhere = await assert_refused(await alone.post("/v1/cache/drain", {"node": "n1"}), 400, "node")

    assert unknown == "no shard on node 'n7', only on n0, n1"
    assert nowhere == "no other node has a shard to take its records"


async def test_operations_need_the_admin_scope(tmp_path: Path) -> None:
    key, entry = new_key("alpha", admin=False)
    write_table(tmp_path / "keys", KeyTable({entry.id: entry}))
    served = Served(Settings(api_keys_file=tmp_path / "keys"))

    assert (await served.post("/v1/cache/drain", {"node": "n1"}, key)).status_code == 403
    for path in ("pin", "unpin", "evict"):
        body = CHAT | ({} if path == "evict" else {"owner": "me"})
        body |= {"ttl_s": 5} if path == "pin" else {}
        assert (await served.post(f"/v1/cache/{path}", body, key)).status_code == 403
        assert (await served.post(f"/v1/cache/{path}", body)).status_code == 401
    headers = {"Authorization": f"Bearer {key}"}
    assert (await served.http.get("/v1/cache/stats", headers=headers)).status_code == 403
    assert (await served.post("/v1/cache/lookup", CHAT, key)).status_code == 200
    await served.http.aclose()


class Silent(ScriptedBackend):
    """Its replica never tells its figures."""

    async def stats(self) -> dict[str, Figures]:
        await asyncio.Event().wait()
        return await super().stats()


async def test_figures_of_a_replica_that_does_not_answer_are_not_waited_for() -> None:
    served = Served(Settings(), backend=Silent(), replicas_timeout_s=0.01)

    stats = await asyncio.wait_for(served.http.get("/v1/cache/stats"), 10)

    assert (set(stats.json()["shards_by_node"]), stats.json()["replicas"]) == (set(NODES), {})
    await served.http.aclose()


async def test_shards_that_hang_hold_no_other_request_up() -> None:
    answering = threading.Event()

    def hanging() -> tuple[str, ...]:
        answering.wait(60)
        return NODES

    served = Served(Settings(), hanging)
    asked = [asyncio.create_task(served.http.get("/v1/cache/stats")) for _ in range(64)]
    for _ in range(100):
        await asyncio.sleep(0)  # until they are where they wait
    long = {"prompt": "too long to be tokenized in the event loop " * 200, "max_tokens": 1}

    answer = await asyncio.wait_for(served.http.post("/v1/completions", json=long), 20)

    assert answer.status_code == 200
    assert not any(task.done() for task in asked)
    answering.set()
    assert [task.status_code for task in await asyncio.gather(*asked)] == [200] * 64
    await served.http.aclose()


async def test_a_store_that_cannot_be_reached_is_503() -> None:
    def gone() -> tuple[str, ...]:
        raise StoreUnavailable("no manager")

    served = Served(Settings(), gone)
    response = await served.post("/v1/cache/lookup", CHAT)

    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    await served.http.aclose()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/cache/lookup", {"temperature": 0}, "temperature"),
        ("/v1/cache/lookup", CHAT | {"owner": "me"}, "owner"),
        ("/v1/cache/lookup", {}, "prompt"),
        ("/v1/cache/lookup", CHAT | {"prompt": "x"}, "prompt"),
        ("/v1/cache/lookup", CHAT | {"namespace": "00"}, "namespace"),
        ("/v1/cache/pin", CHAT | {"owner": "me"}, "ttl_s"),
        ("/v1/cache/pin", CHAT | {"owner": "me", "ttl_s": True}, "ttl_s"),
        ("/v1/cache/pin", CHAT | {"owner": "me", "ttl_s": -1}, "ttl_s"),
        ("/v1/cache/pin", CHAT | {"owner": "me", "ttl_s": 10**400}, "ttl_s"),
        ("/v1/cache/pin", CHAT | {"owner": 5, "ttl_s": 1}, "owner"),
        ("/v1/cache/unpin", CHAT | {"owner": ""}, "owner"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "x", "tokens": [1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10_000]}, "tokens"),
        ("/detokenize", {"tokens": [5], "x": 1}, "tokens"),
    ],
)
async def test_bad_bodies_name_the_field(
    path: str, body: dict[str, Any], param: str, served: Served
) -> None:
    await assert_refused(await served.post(path, body), 400, param)


async def test_bodies_are_bounded_everywhere(served: Served) -> None:
    paths = ["warm", "lookup", "pin", "unpin", "evict"]
    for path in [f"/v1/cache/{name}" for name in paths] + ["/tokenize", "/detokenize"]:
        response = await served.http.post(path, content=b" " * 200_000)
        await assert_refused(response, 413, "body")


# --- tokens


async def test_tokens_there_and_back(served: Served) -> None:
    text = "Grüße, 世界"

    tokens = await served.done("/tokenize", {"prompt": text})
    back = await served.done("/detokenize", {"tokens": tokens["tokens"]})

    assert tokens["count"] == len(tokens["tokens"]) == len(text.encode())
    assert tokens["max_model_len"] == CARD.context_tokens
    assert back == {"prompt": text}


async def test_a_chat_is_tokenized_as_it_would_be_asked(served: Served) -> None:
    tokens = await served.done("/tokenize", CHAT)
    usage = (await served.done("/v1/chat/completions", CHAT))["usage"]

    assert tokens["count"] == usage["prompt_tokens"]
    assert tuple(tokens["tokens"]) == served.backend.requests[-1].prompt.token_ids


async def test_token_ids_as_prompt_ask_for_the_same_as_the_text(served: Served) -> None:
    text = "A prompt.\n\n" * 30
    ids = (await served.done("/tokenize", {"prompt": text}))["tokens"]

    for prompt in (text, ids, [ids]):
        await served.done("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0})

    by_text, *by_ids = (request.prompt for request in served.backend.requests)
    assert [prompt == by_text for prompt in by_ids] == [True, True]


async def test_an_echoed_prompt_of_ids_is_its_text(served: Served) -> None:
    ids = (await served.done("/tokenize", {"prompt": "Say "}))["tokens"]

    answer = await served.done("/v1/completions", {"prompt": ids, "echo": True})

    assert answer["choices"][0]["text"] == "Say answer"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [CARD.vocab_size]}, "prompt"),
        ({"prompt": [1], "documents": [{"text": "a"}]}, "documents"),
    ],
)
async def test_ids_that_are_none_are_refused(
    body: dict[str, Any], param: str, served: Served
) -> None:
    await assert_refused(await served.post("/v1/completions", body), 400, param)


async def test_the_description_names_every_endpoint(served: Served) -> None:
    paths = (await served.http.get("/openapi.json")).json()["paths"]

    assert {"/tokenize", "/detokenize", "/v1/completions", "/v1/cache/pin"} <= set(paths)
    pin = paths["/v1/cache/pin"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(pin["required"]) == {"owner", "ttl_s"}
