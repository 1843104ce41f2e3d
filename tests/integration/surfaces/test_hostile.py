"""Callers who mean harm: refused or bounded, and the service answers others meanwhile."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

import grpc
import httpx
import pytest

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.rpc.v1 import generation_pb2 as generation
from rakv_cluster.testing.scrapes import figure
from rakv_cluster.testing.surfaces import Surface
from rakv_cluster.testing.waiting import eventually

from .conftest import BODY_TIMEOUT_S, LEAST_CHUNK_TOKENS, Cluster
from .test_generation import USER, chat

pytestmark = pytest.mark.cluster

IDLE = 1000
PATHS = ["../../../../etc/passwd", "/etc/passwd", "..\\..\\x", "%2e%2e%2f", "a\u0000b", "~/.ssh/id"]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    """This process opens more connections than most limits allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def address(cluster: Cluster, surface: str) -> tuple[str, int]:
    """Where a surface listens."""
    place = cluster.target if surface == "grpc" else cluster.url.removeprefix("http://")
    host, port = place.split(":")
    return host, int(port)


def bearer(cluster: Cluster, tenant: str = "alpha") -> dict[str, str]:
    return {"Authorization": f"Bearer {cluster.keys[tenant]}"}


def answers(cluster: Cluster) -> bool:
    """Whether somebody else is served on both surfaces."""
    texts = set()
    for kind in ("http", "grpc"):
        with closing(cluster.surface(kind, "beta")) as other:
            texts.add(other.ask(**chat(max_tokens=4)).text)
    return len(texts) == 1


def counted(cluster: Cluster, source: str) -> float:
    """Prompt tokens by where they came from, as /metrics tells an administrator."""
    return figure(cluster.metrics(), "rakv_prompt_tokens_total", f'source="{source}"')


# --- other tenants' KV


def test_no_metric_moves_when_another_tenant_asks_the_same(
    surface: Surface, cluster: Cluster, views: ExitStack
) -> None:
    beta = views.enter_context(closing(cluster.surface(surface.name, "beta")))
    fields = chat(documents=[{"text": f"Secret over {surface.name}.\n\n" * 60}], max_tokens=1)
    surface.ask(**fields)
    # One that another test left is counted when its end is noticed.
    eventually(
        lambda: figure(cluster.metrics(), "rakv_requests_in_flight") == 0, "nothing else is asked"
    )
    before = counted(cluster, "ram"), counted(cluster, "disk"), counted(cluster, "computed")

    usage = beta.ask(**fields).usage

    after = counted(cluster, "ram"), counted(cluster, "disk"), counted(cluster, "computed")
    assert after[1] == before[1]
    assert after[0] - before[0] == usage.cached_tokens < LEAST_CHUNK_TOKENS
    assert after[2] - before[2] == usage.sources["computed"]


def test_metrics_need_the_admin_scope(cluster: Cluster) -> None:
    for tenant in ("alpha", "beta"):
        refused = httpx.get(f"{cluster.url}/metrics", headers=bearer(cluster, tenant), timeout=60)
        assert refused.status_code == 403


@pytest.mark.parametrize("field", ["namespace", "tenant", "salt", "cache_salt", "prefix_key"])
def test_a_body_cannot_name_a_namespace(cluster: Cluster, field: str) -> None:
    refused = httpx.post(
        f"{cluster.url}{CHAT}",
        json=chat(**{field: "alpha"}),
        headers=bearer(cluster, "beta"),
        timeout=60,
    )

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field


def test_headers_cannot_name_a_namespace(cluster: Cluster) -> None:
    fields = chat(documents=[{"text": "Guarded text.\n\n" * 60}], max_tokens=1)
    forged = [(name, "alpha") for name in ("x-tenant", "x-namespace", "x-forwarded-user")]
    with closing(cluster.surface("http")) as alpha:
        alpha.ask(**fields)

    headers = bearer(cluster, "beta") | dict(forged)
    over_http = httpx.post(f"{cluster.url}{CHAT}", json=fields, headers=headers, timeout=60).json()
    given = generation.Input(prompt="Guarded text.\n\n" * 60)
    request = generation.GenerateRequest(input=given, max_tokens=1)
    with grpc.insecure_channel(cluster.target) as channel:
        raw = channel.unary_unary("/rakv.v1.Generation/Generate")(
            request.SerializeToString(),
            metadata=[("authorization", headers["Authorization"]), *forged],
            timeout=60,
        )

    # What beta's own former prompts begin with, it may find again; no chunk is that short.
    assert over_http["usage"]["prompt_tokens_details"]["cached_tokens"] < LEAST_CHUNK_TOKENS
    assert generation.GenerateResponse.FromString(raw).usage.cached_tokens < LEAST_CHUNK_TOKENS


# --- names and bodies


@pytest.mark.parametrize("name", PATHS)
def test_names_are_never_paths(
    surface: Surface, root: Surface, cluster: Cluster, name: str
) -> None:
    def files() -> set[Path]:
        folder = cluster.log.parent
        return {p for p in folder.rglob("*") if not p.is_relative_to(folder / "store")}

    before = files()
    reply = surface.ask(**chat(documents=[{"id": name, "text": "Some text."}], max_tokens=1))
    root.cache("pin", messages=USER, owner=name, ttl_s=1.0)
    model = httpx.get(f"{cluster.url}/v1/models/{quote(name)}", headers=bearer(cluster), timeout=60)

    assert reply.usage.output_tokens == 1
    assert model.status_code in {400, 404}
    assert "root:" not in model.text
    assert files() == before


def test_a_prompt_of_megabytes_is_refused_unseen(surface: Surface, cluster: Cluster) -> None:
    text = "word " * (900_000 // 5)
    with pytest.raises(InvalidRequest, match="at least") as caught:
        surface.ask(**chat(messages=[{"role": "user", "content": text}]))
    assert caught.value.field == "messages"


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'{"messages":[', b'{"response_format":{"x":'])
def test_deeply_nested_bodies(cluster: Cluster, opened: bytes) -> None:
    body = opened * (1_000_000 // len(opened))
    refused = httpx.post(f"{cluster.url}{CHAT}", content=body, headers=bearer(cluster), timeout=60)

    assert refused.status_code == 400
    assert answers(cluster)


def test_deeply_nested_messages(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.target) as channel:
        call = channel.unary_unary("/rakv.v1.Generation/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            # Groups that open and never close.
            call(
                b"\x0b" * 1_000_000,
                metadata=[("authorization", f"Bearer {cluster.keys['alpha']}")],
                timeout=60,
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]  # a call's error
    assert answers(cluster)


# --- floods


@pytest.mark.parametrize(
    "headers",
    [[("x-flood", "x" * 1_000_000)], [(f"x-{i}", "y" * 50) for i in range(20_000)]],
    ids=["long", "many"],
)
def test_header_floods(cluster: Cluster, headers: list[tuple[str, str]]) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    with socket.create_connection(address(cluster, "http"), timeout=30) as connection:
        try:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
            answer = connection.recv(64)
        except ConnectionError:
            answer = b""  # cut off while it was still sending
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    with grpc.insecure_channel(cluster.target) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/rakv.v1.Generation/Generate")(b"", metadata=headers, timeout=60)
    assert caught.value.code() in {  # type: ignore[attr-defined]  # a call's error
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL,
    }  # fmt: skip
    assert answers(cluster)


def test_a_body_that_does_not_arrive_is_given_up(cluster: Cluster, views: ExitStack) -> None:
    key = cluster.keys["alpha"]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    slow = [
        views.enter_context(socket.create_connection(address(cluster, "http"), timeout=60))
        for _ in range(50)
    ]
    for connection in slow:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())

    assert answers(cluster)
    for connection in slow:
        connection.settimeout(BODY_TIMEOUT_S + 30)
        assert connection.recv(64).startswith(b"HTTP/1.1 408 ")


def test_clients_that_do_not_read(surface: Surface, cluster: Cluster, views: ExitStack) -> None:
    for _ in range(6):
        events = views.enter_context(surface.stream(**chat(max_tokens=400)))
        next(events)

    assert answers(cluster)
    views.close()
    eventually(lambda: cluster.running() == 0.0, "the engine has nothing left to run")


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_thousand_idle_connections(surface: Surface, cluster: Cluster, said: bytes) -> None:
    with ExitStack() as idle:
        for _ in range(IDLE):
            place = address(cluster, surface.name)
            connection = idle.enter_context(socket.create_connection(place, timeout=30))
            connection.sendall(said)

        assert answers(cluster)
