"""``rakv serve`` on a real Ray: what only the whole stack can show."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rakv_cluster.cli.local_service import LocalService
from rakv_cluster.testing.chats import CHAT, LASTING, chat
from rakv_cluster.testing.processes import command, descendants, served, workers
from rakv_cluster.testing.scrapes import cancelled, figure, running
from rakv_cluster.testing.waiting import eventually, first_where

pytestmark = pytest.mark.cluster

DOCUMENTS = [{"id": "a", "text": "Alpha. " * 100}, {"id": "b", "text": "Beta. " * 100}]


def flags(model: Path, store: Path) -> dict[str, str]:
    # Whether loading pays off is a matter of time for a model this small: not priced here.
    return {"model": str(model), "store-dir": str(store), "set": "price_loads=false"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def service(tiny_folder: Path, folder: Path) -> Iterator[LocalService]:
    with served(flags(tiny_folder, folder / "store"), folder / "serve.log") as running:
        yield running


@pytest.fixture
def http(service: LocalService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=300.0) as client:
        yield client


@pytest.fixture
def metrics(http: httpx.Client) -> Callable[[], str]:
    """Scrapes the service."""
    return lambda: http.get("/metrics").text


def test_it_is_ready_when_it_says_so(http: httpx.Client) -> None:
    # A probe gives a replica little time, and a busy machine may take it.
    ready = first_where(lambda: http.get("/readyz"), lambda r: r.status_code == 200, "it is ready")
    assert ready.json() == {"status": "ready", "model": "tiny"}


def test_documents_by_id_are_ready_too(service: LocalService, http: httpx.Client) -> None:
    below = [command(pid) for pid in descendants(service.pid)]

    assert any("DocumentRegistry" in each for each in below)
    assert http.get("/v1/documents").json() == {"object": "list", "data": []}


def test_the_openai_client_works_against_it(service: LocalService) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"documents": DOCUMENTS},
    }
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(**fields)
        again = first_where(
            lambda: client.chat.completions.create(**fields),
            lambda answer: answer.usage.prompt_tokens_details.cached_tokens >= 1300,
            "the documents are reused",
        )
        chunks = list(client.chat.completions.create(**fields, stream=True))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**fields | {"temperature": -1})

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert first.choices[0].message.content == again.choices[0].message.content == text
    assert refused.value.param == "temperature"


def test_a_stream_comes_step_by_step(http: httpx.Client) -> None:
    with http.stream("POST", CHAT, json=chat(stream=True, max_tokens=400)) as response:
        first = next(response.iter_text())

    assert first.count("data: ") < 400


@pytest.mark.parametrize(
    ("content", "status", "field"),
    [
        (b"\xff", 400, None),
        (json.dumps(chat(temperature=-1)).encode(), 400, "temperature"),
        (json.dumps(chat(documents=[{"id": "a"}])).encode(), 404, "documents.0.id"),
        (json.dumps(chat(documents=[{"text": "x" * 10_000_000}])).encode(), 413, "body"),
        (json.dumps(chat(documents=[{"text": "x" * 5000}])).encode(), 400, "messages"),
        (json.dumps(chat(stream=True, documents=[{"text": "x" * 5000}])).encode(), 400, "messages"),
    ],
    ids=["not utf-8", "temperature", "unknown document", "10 MB", "too long", "too long, streamed"],
)
def test_bad_input_is_refused_and_the_service_goes_on(
    http: httpx.Client, content: bytes, status: int, field: str | None
) -> None:
    refused = http.post(CHAT, content=content)
    answered = http.post(CHAT, json=chat())

    assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)
    assert answered.status_code == 200


def test_a_stream_whose_client_goes_away_frees_the_engine(
    http: httpx.Client, metrics: Callable[[], str]
) -> None:
    eventually(lambda: running(metrics) == 0, "nothing else runs")
    before = cancelled(metrics)
    with http.stream("POST", CHAT, json=chat(**LASTING, stream=True)) as response:
        lines = response.iter_lines()
        next(lines)

    eventually(lambda: cancelled(metrics) > before, "the engine ended the request")
    eventually(lambda: running(metrics) == 0, "the engine has nothing left to run")


def test_a_client_that_does_not_wait_for_the_answer_frees_the_engine(
    service: LocalService, metrics: Callable[[], str]
) -> None:
    choices = 8  # as many as run at once: looking takes a moment, by which they must not be done
    body = json.dumps(chat(**LASTING, n=choices))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = service.base_url.removeprefix("http://").split(":")
    eventually(lambda: running(metrics) == 0, "nothing else runs")
    before = cancelled(metrics)

    with socket.create_connection((host, int(port)), timeout=60) as hasty:
        hasty.sendall((head + body).encode())
        eventually(lambda: running(metrics) == choices, "the engine works on the request")

    eventually(lambda: cancelled(metrics) >= before + choices, "the engine ended the request")


def retries(http: httpx.Client) -> float:
    return figure(http.get("/metrics").text, "rakv_replica_retries_total")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}])
def test_a_stream_outlives_its_replica(
    service: LocalService, http: httpx.Client, sampling: dict[str, Any]
) -> None:
    # Without drafts, lest it is over before its replica is.
    fields = chat(max_tokens=800, speculation="off", **sampling)
    whole = http.post(CHAT, json=fields).json()["choices"][0]["message"]["content"]
    (worker,) = workers(service)
    before = retries(http)

    with http.stream("POST", CHAT, json=fields | {"stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        received = [next(lines)]
        os.kill(worker, signal.SIGKILL)
        received += list(lines)

    assert received[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in received[:-1]]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == whole
    assert retries(http) == before + 1
    assert workers(service) != [worker]


def asked_about_documents(service: LocalService) -> dict[str, Any]:
    response = httpx.post(
        service.base_url + CHAT, json=chat(documents=DOCUMENTS), timeout=120.0
    ).raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def kept_on_disk(service: LocalService) -> bool:
    """Whether the prompt about the documents is. A write that the disk is late for is lost for
    as long as RAM has the record: then it is computed and stored once more."""

    def whole() -> bool:
        chunks = operate("lookup").get("chunks")  # none while the shard cannot be reached
        return bool(chunks) and all(chunk["nodes"] for chunk in chunks)

    def operate(operation: str) -> dict[str, Any]:
        fields = {name: chat(documents=DOCUMENTS)[name] for name in ("messages", "documents")}
        url = f"{service.base_url}/v1/cache/{operation}"
        answer: dict[str, Any] = httpx.post(url, json=fields, timeout=120.0).json()
        return answer

    with suppress(AssertionError):
        eventually(whole, "every chunk is on the disk", timeout_s=10.0)
        return True
    operate("evict")
    asked_about_documents(service)
    return False


def test_a_damaged_store_is_put_aside_and_the_new_one_outlives_the_service(
    tiny_folder: Path, tmp_path: Path
) -> None:
    generation = tmp_path / "store" / "shard" / "gen-000001"
    generation.mkdir(parents=True)
    (generation / "data.mdb").write_bytes(os.urandom(100_000))
    (generation.parent / "CURRENT").write_text("gen-000001\n")
    arguments = flags(tiny_folder, tmp_path / "store")

    with served(arguments, tmp_path / "first.log") as service:
        first = asked_about_documents(service)
        eventually(lambda: kept_on_disk(service), "the documents are on the disk", timeout_s=60.0)
    with served(arguments, tmp_path / "second.log") as service:
        second = asked_about_documents(service)

    assert (tmp_path / "first.log").read_text().count("the cache starts empty") == 1
    assert "starts empty" not in (tmp_path / "second.log").read_text()
    assert first["rakv"]["tokens"]["computed"] == first["usage"]["prompt_tokens"]
    # A replica that starts takes what it can from the disk into RAM.
    assert second["rakv"]["tokens"]["ram"] + second["rakv"]["tokens"]["disk"] >= 1300
    assert second["choices"] == first["choices"]


def test_an_unusable_store_folder_costs_the_disk_tier_only(
    tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    arguments = flags(tiny_folder, tmp_path / "store")

    with served(arguments, tmp_path / "serve.log") as service:
        first_where(
            lambda: asked_about_documents(service),
            lambda answer: answer["rakv"]["tokens"]["ram"] >= 1300,
            "the documents are in RAM",
        )

    assert (tmp_path / "serve.log").read_text().count("without the disk tier") == 1
