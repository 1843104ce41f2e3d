"""``rakv serve`` on a real Ray: what only the whole stack can show."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rakv_cluster.cli.local_service import LocalService
from rakv_cluster.testing.chats import CHAT, chat
from rakv_cluster.testing.processes import served, workers
from rakv_cluster.testing.waiting import eventually

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
    with httpx.Client(base_url=service.base_url, timeout=120.0) as client:
        yield client


def running(http: httpx.Client) -> float:
    """Requests that the engine works on, from the service's own metrics."""
    lines = http.get("/metrics").text.splitlines()
    return float(next(x for x in lines if x.startswith("rakv_engine_running{")).split()[-1])


def test_it_is_ready_when_it_says_so(http: httpx.Client) -> None:
    assert http.get("/readyz").json() == {"status": "ready", "model": "tiny"}


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
        again = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**fields | {"temperature": -1})

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert first.choices[0].message.content == again.choices[0].message.content == text
    assert again.usage.prompt_tokens_details.cached_tokens >= 1300
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


def test_a_stream_whose_client_goes_away_frees_the_engine(http: httpx.Client) -> None:
    with http.stream("POST", CHAT, json=chat(stream=True, max_tokens=1900)) as response:
        lines = response.iter_lines()
        next(lines)

    eventually(lambda: running(http) == 0, "the engine has nothing left to run")
    metrics = http.get("/metrics").text
    assert 'reason="cancelled"' in metrics


def test_a_client_that_does_not_wait_for_the_answer_frees_the_engine(
    service: LocalService, http: httpx.Client
) -> None:
    def cancelled() -> float:
        lines = http.get("/metrics").text.splitlines()
        found = [x for x in lines if 'reason="cancelled"' in x and "engine_finished_total" in x]
        return float(found[0].split()[-1]) if found else 0.0

    before = cancelled()
    with (
        httpx.Client(base_url=service.base_url, timeout=0.5) as hasty,
        pytest.raises(httpx.ReadTimeout),
    ):
        hasty.post(CHAT, json=chat(max_tokens=1900))

    eventually(lambda: cancelled() == before + 1, "the engine ended the request")


def retries(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(x for x in lines if x.startswith("rakv_replica_retries_total")).split()[-1])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}])
def test_a_stream_outlives_its_replica(
    service: LocalService, http: httpx.Client, sampling: dict[str, Any]
) -> None:
    fields = chat(max_tokens=600, **sampling)
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
        asked_about_documents(service)
        again = asked_about_documents(service)

    assert (tmp_path / "serve.log").read_text().count("without the disk tier") == 1
    assert again["rakv"]["tokens"]["ram"] >= 1300
