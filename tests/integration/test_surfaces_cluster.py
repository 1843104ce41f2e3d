"""Keys, tenants, gRPC, cache operations and batch on a real Ray with a real engine and disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
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
from rakv_cluster.testing.waiting import eventually, first_where

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
    assert httpx.get(f"{service.url}/healthz", timeout=60).status_code == 200
    assert httpx.get(f"{service.url}/metrics", timeout=60).status_code == 401
    with Client(service.url) as http, pytest.raises(Unauthenticated):
        http.chat("q")
    with GrpcClient(service.target) as grpc, pytest.raises(Unauthenticated):
        grpc.chat("q")


def test_both_surfaces_answer_alike_and_share_one_cache(service: Service) -> None:
    key = service.keys["alpha"]
    with Client(service.url, api_key=key) as http, GrpcClient(service.target, api_key=key) as grpc:
        over_http = first_where(
            lambda: http.chat("q", documents=DOCUMENTS, temperature=0, max_tokens=8),
            lambda answer: answer.cached_tokens > 0.9 * answer.prompt_tokens,
            "what is asked over HTTP is stored",
        )
        over_grpc = grpc.chat("q", documents=DOCUMENTS, temperature=0, max_tokens=8)

    assert over_grpc.text == over_http.text
    assert over_grpc.cached_tokens > 0.9 * over_grpc.prompt_tokens


def stored(client: GrpcClient, name: str) -> list[Document]:
    """Documents that are on the disk, to which they are written behind the answer.

    A write that the disk is late for is lost: then another text is tried. The first chunk, the
    template's own text, is that of all prompts and may be on the disk or not.
    """
    for attempt in range(6):
        documents = [Document(f"{name} {attempt}.\n\n" * 60, name)]
        client.warm("q", documents=documents)
        with suppress(AssertionError):
            eventually(
                lambda given=documents: all(
                    chunk.nodes for chunk in client.lookup("q", documents=given).chunks[1:]
                ),
                "every chunk of the document is on the disk",
                timeout_s=10.0,
            )
            return documents
    raise AssertionError("no text reached the disk")


def test_what_is_warmed_is_found_on_disk_pinned_and_removed(service: Service) -> None:
    with GrpcClient(service.target, api_key=service.keys["root"]) as root:
        documents = stored(root, "warmed")
        least = len(root.lookup("q", documents=documents).chunks) - 1
        pinned = root.pin("q", documents=documents, owner="t", ttl_s=600).pinned_chunks
        assert least <= pinned <= least + 1
        assert root.unpin("q", documents=documents, owner="t").ended_pins == pinned
        shards = first_where(
            lambda: root.stats().shards_by_node, bool, "the node's shard answers in time"
        )
        assert sum(shard.records for shard in shards.values()) >= least
        assert root.evict("q", documents=documents).removed_records >= least
        # Repeated: a request stores its last KV a moment after its answer.
        eventually(
            lambda: root.evict("q", documents=documents).removed_records == 0,
            "nothing is left to remove",
        )
        assert root.lookup("q", documents=documents).stored_tokens == 0
    url = f"{service.url}/v1/cache/stats"
    headers = {"Authorization": f"Bearer {service.keys['root']}"}
    first_where(
        lambda: httpx.get(url, headers=headers, timeout=60).json()["shards_by_node"],
        lambda shards: len(shards) == 1,
        "it answers over HTTP, too",
    )


def test_tenants_share_nothing(service: Service) -> None:
    with (
        GrpcClient(service.target, api_key=service.keys["alpha"]) as alpha,
        GrpcClient(service.target, api_key=service.keys["beta"]) as beta,
    ):
        documents = stored(alpha, "private")
        first_where(
            lambda: alpha.chat("q", documents=documents, max_tokens=1).cached_tokens,
            bool,
            "alpha reuses its own",
        )

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
