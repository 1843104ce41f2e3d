"""No body makes a defect: every answer of every endpoint is a success or a 4xx that says why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.serving.admin_api import add_cache_routes
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/cache/warm", "/v1/cache/lookup",
    "/v1/cache/pin", "/v1/cache/unpin", "/v1/cache/evict", "/tokenize", "/detokenize",
]  # fmt: skip
FIELDS = [
    "messages", "prompt", "documents", "model", "max_tokens", "temperature", "top_p", "top_k", "n",
    "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options", "echo",
    "owner", "ttl_s", "tokens", "reuse", "speculation", "user", "tools", "response_format",
    "nonsense",
]  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
LIKELY = {
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "boss"]), "content": TEXT}
        ),
        max_size=3,
    ),
    "documents": st.lists(st.fixed_dictionaries({"text": TEXT}, optional={"id": TEXT}), max_size=3),
    "tokens": st.lists(st.integers(-1, 300), max_size=5),
    "prompt": TEXT | st.lists(st.integers(-1, 300), max_size=5),
}
BODIES = st.fixed_dictionaries(
    {}, optional={name: LIKELY.get(name, VALUES) | VALUES for name in FIELDS}
)


@pytest.fixture(scope="module")
def app() -> Any:
    served, metrics = Settings(), ServiceMetrics()
    service = scripted_service(ScriptedBackend(), served, ManualClock())
    shards = SimulatedShards(["n0"], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, lambda: ["n0"], ManualClock())
    app = create_app(service, metrics)
    add_cache_routes(app, CacheApi(service, metrics, admin), served)
    return app


def post(app: Any, path: str, body: bytes) -> httpx.Response:
    async def ask() -> httpx.Response:
        # Defects are raised by the transport, which is what this looks for.
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return await http.post(path, content=body)

    return asyncio.run(ask())


def check(response: httpx.Response) -> None:
    assert response.status_code in {200, 400, 404, 413}, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), body=BODIES)
def test_any_object(app: Any, path: str, body: dict[str, Any]) -> None:
    check(post(app, path, json.dumps(body).encode()))


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=40))
def test_any_bytes(app: Any, path: str, body: bytes) -> None:
    check(post(app, path, body))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "' + b"\\ud800" + b'"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"tokens": [1e400]}',
        b'{"prompt": 1, "prompt": "x"}',
    ],
    ids=["lists", "objects", "messages", "surrogate", "surrogate in a message", "inf", "twice"],
)
def test_hostile_json(app: Any, path: str, body: bytes) -> None:
    check(post(app, path, body))
