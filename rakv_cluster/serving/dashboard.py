"""``/dashboard``: one page without outside resources, and the data it shows.

The page itself says nothing about the service and answers without a key, since a browser sends
none; its data need the admin scope like ``/metrics``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from rakv_cluster.errors import RakvError
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.http_access import caller_of
from rakv_cluster.serving.http_io import json_response
from rakv_cluster.serving.service import Service
from rakv_cluster.store.base import StoreStats
from rakv_cluster.telemetry import Figures, ServiceMetrics

_RECENT = 20
_TIMEOUT_S = 2.0


def add_dashboard(app: FastAPI, service: Service, metrics: ServiceMetrics, cache: CacheApi) -> None:
    """Serve ``/dashboard`` and ``/dashboard/data``."""
    page = resources.files("rakv_cluster.serving").joinpath("dashboard.html").read_text("utf-8")
    headers = {"Content-Security-Policy": _policy(page), "Referrer-Policy": "no-referrer"}

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers=headers)

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        """Whatever can be had now; a part that does not answer in time is missing and named."""
        caller_of(request).require_admin()
        missing: list[str] = []
        replicas: Mapping[str, Figures] = {}
        shards: Mapping[str, StoreStats] = {}
        try:
            replicas = await asyncio.wait_for(service.backend.stats(), _TIMEOUT_S)
        except (asyncio.TimeoutError, RakvError):
            missing.append("replicas")
        if service.settings.store == "tiered":
            try:
                shards = await asyncio.wait_for(cache.shards(caller_of(request)), _TIMEOUT_S)
            except (asyncio.TimeoutError, RakvError):
                missing.append("shards")
        return json_response(
            {
                "at_s": service.clock.wall_s(),
                "model": service.model_name,
                "missing": missing,
                "counters": _counters(metrics),
                "ttft": {
                    "cold": asdict(service.recent.ttft(warm=False)),
                    "warm": asdict(service.recent.ttft(warm=True)),
                },
                "replicas": replicas,
                "shards": {node: asdict(stats) for node, stats in shards.items()},
                "recent": [asdict(line) for line in service.recent.lines(_RECENT)],
            }
        )


def _counters(metrics: ServiceMetrics) -> dict[str, list[dict[str, Any]]]:
    """The ingress's own counters and gauges by name, each value with its labels."""
    return {
        family.name: [{"labels": sample.labels, "value": sample.value} for sample in family.samples]
        for family in metrics.families()
        if family.type in {"counter", "gauge"}
    }


def _policy(page: str) -> str:
    """Nothing but this page's own script and style, and requests to this server."""

    def digest(tag: str) -> str:
        body = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        if body is None:
            raise ValueError(f"the page has no <{tag}>")
        return base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; "
        f"style-src 'sha256-{digest('style')}'; connect-src 'self'; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
