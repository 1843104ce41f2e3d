"""Keys, tenants, gRPC, cache operations and batch on a real Ray with a real engine and disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from rakv_cluster.cli.local_service import free_port
from rakv_cluster.cli.main import app
from rakv_cluster.client import Client, Document
from rakv_cluster.client.grpc import GrpcClient
from rakv_cluster.errors import PermissionDenied, Unauthenticated
from rakv_cluster.serving.keys import KeyTable, new_key, write_table
from rakv_cluster.testing.processes import served
from rakv_cluster.testing.waiting import eventually

pytestmark = pytest.mark.cluster

DOCUMENTS = [Document("Alpha line.\n\n" * 60, "a"), Document("Beta line.\n\n" * 60, "b")]


@dataclass(frozen=True, slots=True)
class Service:
    """Where a service with keys answers; keys by tenant, ``root`` has the admin scope."""

    url: str
    target: str
    keys: dict[str, str]


@pytest.fixture(scope="module")
def service(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("surfaces")
    made = {name: new_key(name, admin=name == "root") for name in ("alpha", "beta", "root")}
    write_table(folder / "keys.yaml", KeyTable({entry.id: entry for _, entry in made.values()}))
    port = free_port()
    flags = {
        "model": str(tiny_folder),
        "store-dir": str(folder / "store"),
        # Whether loading pays off is a matter of time for a model this small: not priced here.
        "set": "price_loads=false",
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAKV_GRPC_PORT", str(port))
        environment.setenv("RAKV_API_KEYS_FILE", str(folder / "keys.yaml"))
        with served(flags, folder / "serve.log") as running:
            keys = {name: key for name, (key, _) in made.items()}
            yield Service(running.base_url, f"127.0.0.1:{port}", keys)


def test_a_key_is_asked_for_on_both_surfaces(service: Service) -> None:
    assert httpx.get(f"{service.url}/healthz").status_code == 200
    assert httpx.get(f"{service.url}/metrics").status_code == 401
    with Client(service.url) as http, pytest.raises(Unauthenticated):
        http.chat("q")
    with GrpcClient(service.target) as grpc, pytest.raises(Unauthenticated):
        grpc.chat("q")


def test_both_surfaces_answer_alike_and_share_one_cache(service: Service) -> None:
    key = service.keys["alpha"]
    with Client(service.url, api_key=key) as http, GrpcClient(service.target, api_key=key) as grpc:
        over_http = http.chat("q", documents=DOCUMENTS, temperature=0, max_tokens=8)
        over_grpc = grpc.chat("q", documents=DOCUMENTS, temperature=0, max_tokens=8)

    assert over_grpc.text == over_http.text
    assert over_grpc.cached_tokens > 0.9 * over_grpc.prompt_tokens


def wait_until_stored(client: GrpcClient, documents: list[Document]) -> None:
    """Writing to the disk happens behind the answer."""
    eventually(
        lambda: all(c.nodes for c in client.lookup("q", documents=documents).chunks),
        "every chunk of the prompt is on the disk",
    )


def test_what_is_warmed_is_found_on_disk_pinned_and_removed(service: Service) -> None:
    with GrpcClient(service.target, api_key=service.keys["root"]) as root:
        root.warm("q", documents=DOCUMENTS)
        wait_until_stored(root, DOCUMENTS)
        chunks = len(root.lookup("q", documents=DOCUMENTS).chunks)
        assert root.pin("q", documents=DOCUMENTS, owner="t", ttl_s=60).pinned_chunks == chunks
        assert root.unpin("q", documents=DOCUMENTS, owner="t").ended_pins == chunks
        assert sum(s.records for s in root.stats().shards_by_node.values()) >= chunks
        assert root.evict("q", documents=DOCUMENTS).removed_records >= chunks
        assert root.lookup("q", documents=DOCUMENTS).stored_tokens == 0
    headers = {"Authorization": f"Bearer {service.keys['root']}"}
    stats = httpx.get(f"{service.url}/v1/cache/stats", headers=headers, timeout=60).json()
    assert len(stats["shards_by_node"]) == 1


def test_tenants_share_nothing(service: Service) -> None:
    documents = [Document("Gamma line.\n\n" * 60, "g")]
    with (
        GrpcClient(service.target, api_key=service.keys["alpha"]) as alpha,
        GrpcClient(service.target, api_key=service.keys["beta"]) as beta,
    ):
        alpha.chat("q", documents=documents, max_tokens=1)
        assert alpha.chat("q", documents=documents, max_tokens=1).cached_tokens > 0
        wait_until_stored(alpha, documents)

        assert beta.lookup("q", documents=documents).stored_tokens == 0
        assert beta.chat("q", documents=documents, max_tokens=1).cached_tokens == 0
        with pytest.raises(PermissionDenied):
            beta.evict("q", documents=documents)


def test_a_batch_over_documents(service: Service, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("x", "y"):
        (docs / f"{name}.txt").write_text(f"Document {name}.\n\n" * 60)
    (tmp_path / "prompts.txt").write_text("One?\nTwo?\nThree?")

    done = CliRunner().invoke(
        app,
        ["batch", "run", "--docs", str(docs), "--prompts", str(tmp_path / "prompts.txt"),
         "--out", str(tmp_path / "out.jsonl"), "--url", service.url, "--max-tokens", "4",
         "--window", "1"],
        env={"RAKV_API_KEY": service.keys["beta"]},
    )  # fmt: skip

    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    stats = [json.loads(x) for x in (tmp_path / "out.jsonl.stats.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [""] * 6
    reused = sum(s["cached_tokens"] for s in stats) / sum(s["prompt_tokens"] for s in stats)
    assert reused > 0.4
