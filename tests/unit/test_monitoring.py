"""docs/metrics.md, the Grafana dashboard and the alert rules name what /metrics has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import rakv_cluster
from rakv_cluster.config import Settings
from rakv_cluster.engine.stats import Counters, EngineStats
from rakv_cluster.errors import error_class
from rakv_cluster.routing.report import ReplicaReport
from rakv_cluster.serving.figures import FIGURES, replica_figures
from rakv_cluster.speculation import report as speculation
from rakv_cluster.store.base import StoreStats
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app

ROOT = Path(rakv_cluster.__file__).parent.parent
MONITORING = ROOT / "deploy" / "monitoring"
ASK = {"messages": [{"role": "user", "content": "question " * 40}], "max_tokens": 8}


def documented() -> dict[str, set[str]]:
    """Names of docs/metrics.md and their labels."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*) \|", page(), flags=re.MULTILINE)
    return {name: set(filter(None, labels.split(", "))) for name, labels in rows}


def page() -> str:
    return (ROOT / "docs" / "metrics.md").read_text()


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panels() -> list[dict[str, Any]]:
    content = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    found: list[dict[str, Any]] = content["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_the_page_is_what_the_code_says() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "metrics"), "--check"]
    done = subprocess.run(
        script, capture_output=True, text=True, check=False, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr


async def test_a_scrape_has_no_name_and_no_label_that_the_page_lacks() -> None:
    backend = ScriptedBackend()
    backend.figures |= {f.name: {"x": 1.0} if f.label else 1.0 for f in FIGURES}
    app = scripted_app(backend, Settings(), ManualClock())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://service"
    ) as http:
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
        scraped = (await http.get("/metrics")).text

    known, seen = documented(), set()
    for family in text_string_to_metric_families(scraped):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= known[name] | {"replica", "ingress"}, name
        seen.add(name)
    assert seen == set(known)


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_an_expression_parses_and_names_what_there_is(where: str, expression: str) -> None:
    promql_parser.parse(expression)

    known = documented()
    for name, selector in re.findall(r"(rakv_\w+)(\{[^}]*\})?", expression):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in known, where
        labels = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', selector))
        assert labels <= known[base] | {"replica", "ingress"}, where


def test_alerts_name_statuses_that_requests_can_end_with() -> None:
    for rule in alerts():
        for value in re.findall(r'status=~?"([^"]+)"', rule["expr"]):
            for code in value.split("|"):
                assert error_class(code, lambda _: False).code == code, rule["alert"]


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in {"page", "ticket"}


def test_names_follow_prometheus_conventions() -> None:
    for figure in FIGURES:
        assert re.fullmatch(r"[a-z][a-z0-9_]+", figure.name)
        assert not re.search(r"_(ms|mb|percent|milliseconds)(_|$)", figure.name), "base units"
        assert figure.help.endswith(".")
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


def test_a_replica_reports_every_figure_and_no_other() -> None:
    arm = speculation.ArmReport(2, 1.2, 0.17, 1.5)
    reported = replica_figures(
        EngineStats(1, 2, 3, 4, 5.0, 6.0, 7.0, 8.0, 9, 10, Counters(finished={"stop": 1})),
        StoreStats(1, 2, 3, {"disk_hits": 4}),
        ReplicaReport(backlog_ms=1500.0, token_ms=20.0),
        speculation.ReplicaReport(
            30.0, (arm,), (0.5, 0.7), {"best": 3}, {0: 1, 2: 2}, 0.1, -0.2, 2, 0.0, 1.0, 1
        ),
        ("plain,graphs",),
    )

    assert set(reported) == {figure.name for figure in FIGURES}
    assert reported["engine_prefill_seconds_per_token"] == 0.005
    assert reported["model_refused_kernels_total"] == {"plain,graphs": 1}
    assert reported["replica_backlog_seconds"] == 1.5
    assert reported["speculation_steps_total"] == {"0": 1, "2": 2}
    assert reported["speculation_break_even_acceptance_ratio"] == {"2": 0.17}
    labelled = {figure.name for figure in FIGURES if figure.label}
    assert {name for name, value in reported.items() if isinstance(value, dict)} == labelled


def test_each_replica_is_shown_under_its_name_and_one_that_is_gone_no_longer() -> None:
    metrics = ServiceMetrics()
    metrics.replicas.update(FIGURES, {"a": {"engine_running": 1}, "b": {"engine_running": 2}})
    both = metrics.render().decode()
    metrics.replicas.update(FIGURES, {"b": {"engine_running": 2}})
    one = metrics.render().decode()

    assert 'rakv_engine_running{replica="a"} 1.0' in both
    assert 'rakv_engine_running{replica="b"} 2.0' in both
    assert "rakv_replicas 2.0" in both
    assert 'replica="a"' not in one
    assert "rakv_replicas 1.0" in one


def test_an_ingress_names_itself() -> None:
    metrics = ServiceMetrics("ingress-1")
    metrics.requests.labels("chat", "ok").inc()

    assert (
        'rakv_requests_total{endpoint="chat",ingress="ingress-1",status="ok"} 1.0'
        in metrics.render().decode()
    )
