"""The gate in front of the HTTP application: tenants, scopes and limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rakv_cluster.config import Settings
from rakv_cluster.errors import Overloaded
from rakv_cluster.serving.keys import KeyTable, TenantLimits, new_key, write_table
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app

BODY = {"messages": [{"role": "user", "content": "question " * 40}], "max_tokens": 8}


class Served:
    """A scripted service with keys of two tenants and one administrator."""

    def __init__(
        self,
        folder: Path,
        limits: dict[str, TenantLimits] | None = None,
        backend: ScriptedBackend | None = None,
    ) -> None:
        made = {name: new_key(name, admin=name == "root") for name in ("alpha", "beta", "root")}
        self.keys = {name: key for name, (key, _) in made.items()}
        file = folder / "keys.yaml"
        write_table(file, KeyTable({e.id: e for _, e in made.values()}, limits or {}))
        self.clock = ManualClock()
        self.backend = backend or ScriptedBackend()
        app = scripted_app(self.backend, Settings(api_keys_file=file), self.clock)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://service")

    async def ask(self, name: str, **fields: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions", json=BODY | fields, headers=self.auth(name)
        )

    def auth(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"}


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_two_tenants_with_equal_prompts_never_hit_each_other(tmp_path: Path) -> None:
    served = Served(tmp_path)

    first, again = await served.ask("alpha"), await served.ask("alpha")
    other, other_again = await served.ask("beta"), await served.ask("beta")

    assert [cached(r) > 0 for r in (first, again, other, other_again)] == [
        False, True, False, True,
    ]  # fmt: skip
    tenants = [request.tenant for request in served.backend.requests]
    assert tenants == ["alpha", "alpha", "beta", "beta"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
        ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("PUT", "/v1/models"),
        ("GET", "/healthz/../metrics"), ("GET", "//healthz"),
    ],
)  # fmt: skip
async def test_nothing_but_probes_answers_without_a_key(
    method: str, path: str, tmp_path: Path
) -> None:
    served = Served(tmp_path)

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
        response = await served.http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    assert served.backend.requests == []


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_need_no_key(path: str, tmp_path: Path) -> None:
    assert (await Served(tmp_path).http.get(path)).status_code == 200


async def test_metrics_need_the_admin_scope(tmp_path: Path) -> None:
    served = Served(tmp_path)

    refused = await served.http.get("/metrics", headers=served.auth("alpha"))
    shown = await served.http.get("/metrics", headers=served.auth("root"))

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert shown.status_code == 200


async def test_a_tenant_over_its_rate_waits_and_others_do_not(tmp_path: Path) -> None:
    served = Served(tmp_path, {"alpha": TenantLimits(requests_per_minute=2)})
    for _ in range(2):
        assert (await served.ask("alpha")).status_code == 200

    refused = await served.ask("alpha")

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) == 30
    assert (await served.ask("beta")).status_code == 200
    models = await served.http.get("/v1/models", headers=served.auth("alpha"))
    assert models.status_code == 200
    served.clock.advance(30.0)
    assert (await served.ask("alpha")).status_code == 200


async def test_who_waits_as_long_as_told_gets_in(tmp_path: Path) -> None:
    served = Served(tmp_path, {"alpha": TenantLimits(requests_per_minute=11)})
    for _ in range(11):
        assert (await served.ask("alpha")).status_code == 200

    refused = await served.ask("alpha")
    served.clock.advance(float(refused.headers["retry-after"]))

    assert (await served.ask("alpha")).status_code == 200


async def test_tokens_of_prompt_and_output_are_booked(tmp_path: Path) -> None:
    served = Served(tmp_path, {"alpha": TenantLimits(tokens_per_minute=60)})

    used = (await served.ask("alpha")).json()["usage"]["total_tokens"]
    refused = await served.ask("alpha")

    assert used > 60
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == used - 60 + 1  # until the stock is above 0


async def test_what_is_refused_before_it_ran_takes_no_tokens(tmp_path: Path) -> None:
    full = True

    def answer(prompt: str) -> str:
        if full:
            raise Overloaded("the queue is full", retry_after_s=1.0)
        return "answer"

    limits = {"alpha": TenantLimits(tokens_per_minute=60)}
    served = Served(tmp_path, limits, ScriptedBackend(answer))
    refused = [await served.ask("alpha") for _ in range(2)]
    full = False

    assert [r.json()["error"]["code"] for r in refused] == ["overloaded", "overloaded"]
    assert (await served.ask("alpha")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_counts_as_running_until_its_last_byte(
    stream: bool, tmp_path: Path
) -> None:
    served = Served(tmp_path, {"alpha": TenantLimits(concurrent=1)})
    served.backend.hold()
    running = asyncio.create_task(served.ask("alpha", stream=stream))
    await asyncio.wait_for(served.backend.started.wait(), 10)

    assert (await served.ask("alpha")).status_code == 429
    served.backend.go_on()
    assert (await running).status_code == 200
    assert (await served.ask("alpha")).status_code == 200


async def test_a_refused_body_gives_its_place_back(tmp_path: Path) -> None:
    served = Served(tmp_path, {"alpha": TenantLimits(concurrent=1)})

    for _ in range(3):
        assert (await served.ask("alpha", temperature=-1)).status_code == 400
    assert (await served.ask("alpha")).status_code == 200


async def test_no_response_and_no_metric_shows_a_key(tmp_path: Path) -> None:
    served = Served(tmp_path)
    key = served.keys["alpha"]
    shown = [
        await served.ask("alpha"),
        await served.ask("alpha", temperature=-1),
        await served.http.get("/metrics", headers=served.auth("root")),
        await served.http.get("/v1/models", headers={"Authorization": f"Bearer {key}x"}),
    ]

    secret = key.split("_", 2)[2]
    assert all(secret not in r.text and secret not in str(r.headers) for r in shown)
