"""The router on a Ray cluster of three nodes: a replica on each, with a RAM tier and nothing else.

The tests run in their order: the last ones end replicas and nodes.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.testing.scrapes import figure
from rakv_cluster.testing.served_cluster import ServedCluster, served_cluster
from rakv_cluster.testing.traffic import traffic
from rakv_cluster.testing.waiting import eventually

pytestmark = pytest.mark.cluster

CHAT = "/v1/chat/completions"
EXPLAIN = "/v1/route/explain"
NODES, CLIENTS = 3, 6


@pytest.fixture(scope="module")
def service(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    settings = {
        "model": str(tiny_folder), "store": "memory", "max_running": 4,
        # Whether loading pays off is a matter of time for a model this small: not priced here.
        "price_loads": False,
        "packed_budget_bytes": 0, "ram_budget_bytes": "64MiB", "kv_budget_bytes": "64MiB",
    }  # fmt: skip
    with served_cluster(NODES, settings, tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture
def http(service: ServedCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=180.0) as client:
        yield client


def body(document: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Hello"}],
        "documents": [{"id": document, "text": f"{document} " * 150}],
        "max_tokens": 100,  # the same everywhere: the router learns how long answers are
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def explained(http: httpx.Client, document: str) -> dict[str, Any]:
    answer: dict[str, Any] = http.post(EXPLAIN, json=body(document)).raise_for_status().json()
    return answer


def cost_ms(line: dict[str, Any]) -> float:
    """What replicas are compared by."""
    return float(line["expected_ms"] + line["crowding_ms"])


def holders(http: httpx.Client, document: str) -> set[str]:
    """Replicas that hold most of the document, as the router believes."""
    answer = explained(http, document)
    return {
        line["replica"]
        for line in answer["replicas"]
        if line["reused_tokens"] > answer["prompt_tokens"] / 2
    }


def test_documents_go_back_to_their_replica(http: httpx.Client) -> None:
    # One token: what prefill saves decides, not how fast each replica decoded its few requests so
    # far, which on a busy machine differs by more (then going elsewhere is right).
    back: list[bool] = []
    for batch in range(10):
        names = [f"document{6 * batch + number}" for number in range(6)]
        asked = {name: body(name, max_tokens=1) for name in names}
        for fields in asked.values():
            http.post(CHAT, json=fields).raise_for_status()
        for name, fields in asked.items():
            eventually(lambda name=name: bool(holders(http, name)), f"a replica holds {name}")
            held = holders(http, name)
            costs = {line["replica"]: cost_ms(line) for line in explained(http, name)["replicas"]}
            answer = http.post(CHAT, json=fields).json()
            # Where a stall made the holder look slow, or all hold it, any replica is right.
            elsewhere = [ms for replica, ms in costs.items() if replica not in held]
            if elsewhere and min(costs[replica] for replica in held) < min(elsewhere) / 2:
                back.append(answer["rakv"]["tokens"]["ram"] > answer["usage"]["prompt_tokens"] / 2)
        if len(back) >= 12:
            break
    # One in a hundred explores. Chance gives a third: two thirds of twelve once in fifty runs.
    assert sum(back) >= len(back) * 2 / 3 >= 8, back


def test_an_explanation_generates_nothing_and_adds_up(http: httpx.Client) -> None:
    http.post(CHAT, json=body("explained")).raise_for_status()
    eventually(lambda: bool(holders(http, "explained")), "a replica reports what it holds")
    answer = explained(http, "explained")
    assert len(answer["replicas"]) == NODES
    for line in answer["replicas"]:
        price = line.pop("crowding_ms")
        assert price >= 0
        terms = [value for name, value in line.items() if name.endswith("_ms")]
        assert 2 * line["expected_ms"] == pytest.approx(sum(terms))
    refused = http.post(EXPLAIN, json={"prompt": ""})
    assert refused.status_code == 400


def test_the_command_shows_the_explanation(
    service: ServedCluster, http: httpx.Client, tmp_path: Path
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps(body("shown")))
    shown = CliRunner().invoke(app, ["route", "explain", str(request), "--url", service.url])
    assert shown.exit_code == 0
    for line in explained(http, "shown")["replicas"]:
        assert line["replica"] in shown.stdout


def test_one_hot_document_spreads_when_its_replica_is_busy(http: httpx.Client) -> None:
    answers: list[httpx.Response] = []

    def spread() -> bool:
        with ThreadPoolExecutor(24) as threads:
            answers.extend(threads.map(lambda _: http.post(CHAT, json=body("hot")), range(24)))
        return len(holders(http, "hot")) >= 2

    # Asked again, because a replica that a stall made look slow is rightly left out at first.
    eventually(spread, "several replicas hold the document", timeout_s=120.0)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_a_replica_that_hangs_hides_no_other_from_a_scrape(
    service: ServedCluster, http: httpx.Client
) -> None:
    def answering() -> tuple[int, float]:
        scraped = http.get("/metrics").text
        assert "\nrakv_replicas_unreachable{" in scraped
        shown = set(re.findall(r'rakv_engine_running\{replica="([^"]*)"', scraped))
        return len(shown), figure(scraped, "rakv_replicas_unreachable")

    hung = service.workers()[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        # More than one scrape: on a busy machine another one may be late once.
        eventually(lambda: answering() == (NODES - 1, 1), "the others are shown", timeout_s=20.0)
    finally:
        os.kill(hung, signal.SIGCONT)
    eventually(lambda: answering() == (NODES, 0), "it answers again", timeout_s=60.0)


def test_killing_the_busiest_replica_fails_no_request_and_its_successor_takes_work(
    service: ServedCluster, http: httpx.Client
) -> None:
    fields = body("killed", max_tokens=200)
    whole = http.post(CHAT, json=fields).json()["choices"][0]["message"]["content"]
    before = {pid: cpu_ticks(pid) for pid in service.workers()}
    names = set(service.taken())
    answers: list[httpx.Response] = []

    def retries() -> float:
        return figure(http.get("/metrics").text, "rakv_replica_retries_total")

    # They go on asking, so that the one that dies has requests in hand.
    retried = retries()
    with traffic(9, lambda client, number: answers.append(http.post(CHAT, json=fields))):
        eventually(lambda: len(answers) >= 9, "the first answers", timeout_s=120)
        busiest = max(before, key=lambda pid: cpu_ticks(pid) - before[pid])
        os.kill(busiest, signal.SIGKILL)
        eventually(lambda: retries() > retried, "others go on with them", timeout_s=120)

    assert {answer.status_code for answer in answers} == {200}
    said = [answer.json() for answer in answers]
    assert {answer["choices"][0]["message"]["content"] for answer in said} == {whole}
    assert {answer["usage"]["completion_tokens"] for answer in said} == {200}
    with asking(service):
        eventually(lambda: works(service, names), "its successor takes work", timeout_s=120)


def test_a_node_that_dies_is_done_without_and_one_that_comes_takes_work(
    service: ServedCluster,
) -> None:
    with asking(service) as codes:
        service.remove_node()
        eventually(lambda: service.running() == NODES - 1, "its replica is gone", timeout_s=120)
        names = set(service.taken())
        service.add_node()
        eventually(lambda: works(service, names), "a replica there takes work", timeout_s=240)
    assert set(codes) == {200}


def works(service: ServedCluster, known: set[str]) -> bool:
    """Whether a replica that is not among the ``known`` ones has been given a request."""
    return any(count > 0 for name, count in service.taken().items() if name not in known)


@contextmanager
def asking(service: ServedCluster) -> Iterator[list[int]]:
    """Clients that ask about one document after another; yields the status codes so far."""
    codes: list[int] = []
    with httpx.Client(base_url=service.url, timeout=180.0) as http:

        def ask(client: int, number: int) -> None:
            fields = body(f"{client} {number}", max_tokens=40)
            codes.append(http.post(CHAT, json=fields).status_code)

        with traffic(CLIENTS, ask):
            yield codes


def cpu_ticks(pid: int) -> int:
    """Processor time that a process has used in user mode."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[11])
