"""The cache in an operator's hands, tenants' walls, and where requests go."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rakv_cluster.errors import NotFound
from rakv_cluster.testing.surfaces import Surface
from rakv_cluster.testing.waiting import eventually

from .conftest import LEAST_CHUNK_TOKENS, Cluster
from .test_generation import USER, chat

pytestmark = pytest.mark.cluster

_ATTEMPTS = 6


def documents(surface: Surface, name: str) -> list[dict[str, str]]:
    """Texts that no other test asks about."""
    return [{"id": name, "text": f"{name} over {surface.name}.\n\n" * 60}]


def stored(view: Surface, name: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Documents whose KV is on the disk, and what a look-up says of it.

    A cache may lose a write where it is late: then another text is tried. The first chunk, the
    template's own text, is that of all prompts and may be on the disk or not.
    """
    found: dict[str, Any] = {}
    for attempt in range(_ATTEMPTS):
        given = documents(view, f"{name} {attempt}")
        view.cache("warm", messages=USER, documents=given)

        def all_there(given: list[dict[str, str]] = given) -> bool:
            found.update(view.cache("lookup", messages=USER, documents=given))
            return all(chunk["nodes"] for chunk in found["chunks"][1:])

        with suppress(AssertionError):
            eventually(all_there, "every chunk of the document is on the disk", timeout_s=10.0)
            return given, found
    raise AssertionError(f"no text reached the disk in {_ATTEMPTS} attempts")


def reused(view: Surface, given: list[dict[str, str]]) -> bool:
    """Whether a question about these documents now finds most of its prompt.

    Not at once on a busy machine: writes and loads that are late are done without.
    """
    usage = view.ask(**chat(documents=given, max_tokens=1)).usage
    return usage.cached_tokens > 0.8 * usage.prompt_tokens


def test_what_was_warmed_is_reused(surface: Surface) -> None:
    given, found = stored(surface, "warmed")

    usage = surface.cache("warm", messages=USER, documents=given)["usage"]
    reply = surface.ask(**chat(documents=given, max_tokens=1))

    assert usage["prompt_tokens"] == found["prompt_tokens"] == reply.usage.prompt_tokens
    eventually(lambda: reused(surface, given), "what was warmed is reused")


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
    eventually(lambda: reused(surface, [{"id": document["id"]}]), "it is reused")
    beta = views.enter_context(closing(cluster.surface(surface.name, "beta")))
    with pytest.raises(NotFound) as caught:
        beta.ask(**chat(documents=[{"id": document["id"]}]))
    assert caught.value.field == "documents.0.id"


def test_a_lookup_tells_what_is_stored_where(surface: Surface) -> None:
    unknown = documents(surface, "never seen")
    before = surface.cache("lookup", messages=USER, documents=unknown)

    _, found = stored(surface, "looked up")

    chunks = found["chunks"]
    assert before["stored_tokens"] <= before["chunks"][0]["end"]
    assert not any(chunk["nodes"] for chunk in before["chunks"][1:])
    assert [c["start"] for c in chunks[1:]] == [c["end"] for c in chunks[:-1]]
    assert chunks[-1]["end"] <= found["prompt_tokens"]
    assert all(int(chunk["stored_bytes"]) > 0 for chunk in chunks[1:])


def test_pins_begin_and_end(root: Surface) -> None:
    given, found = stored(root, "pinned")

    pinned = root.cache("pin", messages=USER, documents=given, owner="me", ttl_s=60.0)
    others = root.cache("unpin", messages=USER, documents=given, owner="other")
    ended = root.cache("unpin", messages=USER, documents=given, owner="me")

    chunks = len(found["chunks"])
    assert pinned["prompt_chunks"] == chunks
    assert chunks - 1 <= pinned["pinned_chunks"] <= chunks
    assert (others["ended_pins"], ended["ended_pins"]) == (0, pinned["pinned_chunks"])


def test_what_is_evicted_is_on_no_disk_and_in_no_ram(root: Surface) -> None:
    given, found = stored(root, "evicted")
    prompt = chat(documents=given, max_tokens=1)
    before = root.ask(**prompt)
    eventually(lambda: reused(root, given), "it is reused before")

    first = root.cache("evict", messages=USER, documents=given)

    def nothing_left() -> bool:
        # Repeated: a request stores its last KV a moment after its answer.
        again = root.cache("evict", messages=USER, documents=given)
        left = root.cache("lookup", messages=USER, documents=given)
        return (again["removed_records"], left["stored_tokens"]) == (0, 0)

    assert first["removed_records"] >= len(found["chunks"]) - 1
    eventually(nothing_left, "nothing is left on the disk")
    computed = root.ask(**prompt)
    assert computed.usage.cached_tokens == 0
    assert computed.text == before.text


def test_what_was_evicted_can_be_stored_again(root: Surface) -> None:
    def whole(given: list[dict[str, str]]) -> bool:
        chunks = root.cache("lookup", messages=USER, documents=given)["chunks"]
        return all(chunk["nodes"] for chunk in chunks)

    given, _ = stored(root, "evicted once")
    root.cache("evict", messages=USER, documents=given)

    def stored_again() -> bool:
        # Repeated: a write may be lost where the disk is late.
        root.cache("evict", messages=USER, documents=given)
        root.cache("warm", messages=USER, documents=given)
        with suppress(AssertionError):
            eventually(lambda: whole(given), "the prompt is on the disk", timeout_s=5.0)
        return whole(given)

    eventually(stored_again, "the evicted prompt is on the disk again", timeout_s=30.0)


def test_stats_tell_sizes(root: Surface) -> None:
    root.ask(**chat(max_tokens=1))
    told: dict[str, Any] = {}

    def shard_answers() -> bool:
        told.update(root.stats())
        return len(told["shards_by_node"]) == 1

    eventually(shard_answers, "the node's shard answers in time")
    (shard,) = told["shards_by_node"].values()
    assert int(shard["stored_bytes"]) <= int(shard["budget_bytes"]) > 0
    assert told["replica"]["engine_requests_total"] >= 1


def test_tenants_share_nothing(surface: Surface, cluster: Cluster, views: ExitStack) -> None:
    beta = views.enter_context(closing(cluster.surface(surface.name, "beta")))
    given, _ = stored(surface, "private")

    hidden = beta.cache("lookup", messages=USER, documents=given)
    first = beta.ask(**chat(documents=given))

    # What beta's own former prompts begin with, it may find again: the template's own text.
    assert not any(chunk["nodes"] for chunk in hidden["chunks"][1:])
    assert first.usage.cached_tokens < LEAST_CHUNK_TOKENS
    eventually(lambda: reused(beta, given), "beta reuses its own")
    assert first.text == surface.ask(**chat(documents=given)).text


def test_one_cache_stands_behind_both_surfaces(surface: Surface, cluster: Cluster) -> None:
    given, _ = stored(surface, "shared")

    other = "grpc" if surface.name == "http" else "http"
    with closing(cluster.surface(other)) as view:
        eventually(lambda: reused(view, given), "the other surface reuses it")


def test_a_route_is_explained_and_nothing_generated(surface: Surface, root: Surface) -> None:
    before = root.stats()["replica"]["engine_requests_total"]

    answer = surface.explain(**chat())

    assert answer["chosen"] in {line["replica"] for line in answer["replicas"]}
    assert answer["prompt_tokens"] == surface.ask(**chat(max_tokens=1)).usage.prompt_tokens
    for line in answer["replicas"]:
        terms = [value for name, value in line.items() if name.endswith("_ms")]
        assert all(value >= 0 for value in terms)
    assert root.stats()["replica"]["engine_requests_total"] == before + 1


def test_an_answer_over_http_names_its_id_once(cluster: Cluster) -> None:
    # httpx, and with it OpenAI's client, joins headers of one name by commas.
    headers = {"Authorization": f"Bearer {cluster.keys['alpha']}"}
    with httpx.Client(base_url=cluster.url, headers=headers, timeout=60) as http:
        given = http.get("/v1/models", headers={"x-request-id": "mine"})
        made = http.get("/v1/models")

    assert given.headers.get_list("x-request-id") == ["mine"]
    assert len(made.headers.get_list("x-request-id")) == 1


def test_one_id_runs_through_the_logs_of_all_processes(
    surface: Surface, cluster: Cluster, views: ExitStack
) -> None:
    request_id = f"traced-over-{surface.name}"
    view = views.enter_context(closing(cluster.surface(surface.name, request_id=request_id)))
    secret = "what nobody may read in a log"
    view.ask(**chat(messages=[{"role": "user", "content": secret}]))

    def said() -> dict[str, tuple[Path, dict[str, Any]]]:
        """The last line with this id of each logger."""
        texts = [(file, file.read_text(errors="replace")) for file in cluster.log_files()]
        lines = [(file, line) for file, text in texts for line in text.splitlines(keepends=True)]
        whole = [(file, line) for file, line in lines if line.endswith("\n")]
        found = [(file, json.loads(line)) for file, line in whole if f'"{request_id}"' in line]
        return {line["logger"]: (file, line) for file, line in found}

    wanted = {"rakv.requests", "rakv_cluster.serving.replica"}
    eventually(lambda: wanted <= set(said()), "ingress and replica have logged the request")
    (ingress_file, ingress), (replica_file, replica) = (said()[name] for name in sorted(wanted))
    assert ingress_file != replica_file
    assert ingress["request_id"] == replica["request_id"] == request_id
    assert replica["id"].startswith(ingress["id"])
    assert ingress["tenant"] == replica["tenant"] == "alpha"
    assert not any(secret in file.read_text(errors="replace") for file in cluster.log_files())
