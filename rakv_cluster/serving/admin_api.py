"""The cache's operations over HTTP; what they do is in :mod:`rakv_cluster.serving.cache_api`.

Bodies name a prompt (``messages`` or ``prompt``, ``documents``) as for a completion.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response

from rakv_cluster.config import Settings, nearest
from rakv_cluster.errors import InvalidRequest
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.http_access import caller_of
from rakv_cluster.serving.http_io import json_response, read_body
from rakv_cluster.serving.openai_models import parse_object
from rakv_cluster.serving.openapi import (
    CHUNK,
    COUNT,
    USAGE,
    answered,
    described,
    several,
)
from rakv_cluster.serving.prompt_body import prompt_request, prompt_schema

_BY_NAME: dict[str, Any] = {"type": "object"}
_OWNER = {"owner": {"type": "string", "minLength": 1, "maxLength": 64}}
_PIN = {**_OWNER, "ttl_s": {"type": "number", "exclusiveMinimum": 0}}
_DRAIN = {
    "node": {"type": "string", "description": "as in /v1/cache/stats"},
    "limit_bytes": {"type": "integer", "minimum": 0, "default": 1 << 30},
    "deadline_s": {"type": "number", "exclusiveMinimum": 0, "default": 60},
}
_DRAIN_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": _DRAIN,
                    "required": ["node"],
                    "additionalProperties": False,
                }
            }
        },
    }
}


_Body: TypeAlias = Callable[[Request], Awaitable[dict[str, Any]]]
"""Reads and parses a request's body."""


def add_cache_routes(app: FastAPI, cache: CacheApi, settings: Settings) -> None:
    """Serve ``/v1/cache/...``."""

    async def body(request: Request) -> dict[str, Any]:
        return parse_object(await read_body(request, settings))

    _add_prompt_routes(app, cache, body)
    _add_pin_routes(app, cache, body)
    _add_node_routes(app, cache, body)


def _add_prompt_routes(app: FastAPI, cache: CacheApi, body: _Body) -> None:
    """One prompt: compute it, find it, remove it."""

    @app.post(
        "/v1/cache/warm",
        openapi_extra=prompt_schema({}),
        responses=answered(described(usage=USAGE)),
    )
    async def warm(request: Request) -> Response:
        """Compute a prompt's KV and store it."""
        totals = await cache.warm(prompt_request(await body(request), {}), caller_of(request))
        return json_response({"usage": totals.usage()})

    @app.post(
        "/v1/cache/lookup",
        openapi_extra=prompt_schema({}),
        responses=answered(
            described(prompt_tokens=COUNT, stored_tokens=COUNT, chunks=several(CHUNK))
        ),
    )
    async def lookup(request: Request) -> Response:
        """Which of a prompt's chunks are on which nodes' disks."""
        found = await cache.lookup(prompt_request(await body(request), {}), caller_of(request))
        return json_response(
            {
                "prompt_tokens": found.prompt_tokens,
                "stored_tokens": found.stored_tokens,
                "chunks": [asdict(chunk) for chunk in found.chunks],
            }
        )

    @app.post(
        "/v1/cache/evict",
        openapi_extra=prompt_schema({}),
        responses=answered(described(removed_records=COUNT)),
    )
    async def evict(request: Request) -> Response:
        """Remove a prompt's chunks from all disks and replicas; counts disks'; admin scope."""
        removed = await cache.evict(prompt_request(await body(request), {}), caller_of(request))
        return json_response({"removed_records": removed})


def _add_pin_routes(app: FastAPI, cache: CacheApi, body: _Body) -> None:
    """Keep a prompt, or no longer."""

    @app.post(
        "/v1/cache/pin",
        openapi_extra=prompt_schema(_PIN),
        responses=answered(described(pinned_chunks=COUNT, prompt_chunks=COUNT)),
    )
    async def pin(request: Request) -> Response:
        """Keep a prompt's chunks from eviction for a time; admin scope."""
        data = await body(request)
        prompt = prompt_request(data, _PIN)
        ttl_s = _number(data, "ttl_s")
        pinned = await cache.pin(prompt, caller_of(request), _owner(data), ttl_s)
        return json_response(asdict(pinned))

    @app.post(
        "/v1/cache/unpin",
        openapi_extra=prompt_schema(_OWNER),
        responses=answered(described(ended_pins=COUNT)),
    )
    async def unpin(request: Request) -> Response:
        """End an owner's pins of a prompt; admin scope."""
        data = await body(request)
        prompt = prompt_request(data, _OWNER)
        ended = await cache.unpin(prompt, caller_of(request), _owner(data))
        return json_response({"ended_pins": ended})


def _add_node_routes(app: FastAPI, cache: CacheApi, body: _Body) -> None:
    """Whole nodes and replicas."""

    @app.post(
        "/v1/cache/drain",
        openapi_extra=_DRAIN_SCHEMA,
        responses=answered(described(copied=COUNT, left=COUNT, elsewhere=COUNT)),
    )
    async def drain(request: Request) -> Response:
        """Copy a node's hottest records to other nodes, before it is removed; admin scope."""
        data = await body(request)
        for name in data:
            if name not in _DRAIN:
                raise InvalidRequest(f"unknown field '{name}'{nearest(name, _DRAIN)}", field=name)
        node = data.get("node")
        if not isinstance(node, str):
            raise InvalidRequest("node must be a text", field="node")
        drained = await cache.drain(
            caller_of(request),
            node,
            limit_bytes=int(_number({"limit_bytes": 1 << 30, **data}, "limit_bytes")),
            deadline_s=_number({"deadline_s": 60.0, **data}, "deadline_s"),
        )
        return json_response(asdict(drained))

    @app.get(
        "/v1/cache/stats",
        responses=answered(
            described(shards_by_node={"type": "object"}, replicas={"type": "object"})
        ),
    )
    async def stats(request: Request) -> Response:
        """Sizes and counters of every node's shard, figures of every replica; admin scope."""
        caller = caller_of(request)
        shards = await cache.shards(caller)
        return json_response(
            {
                "shards_by_node": {node: asdict(shard) for node, shard in shards.items()},
                "replicas": await cache.replicas(caller),
            }
        )


def _number(data: dict[str, Any], field: str) -> float:
    value = data.get(field)
    wrong = InvalidRequest(f"{field} must be a number", field=field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong
    try:
        number = float(value)
    except OverflowError as error:
        raise wrong from error
    if not math.isfinite(number):
        raise wrong
    return number


def _owner(data: dict[str, Any]) -> str:
    owner = data.get("owner")
    if not isinstance(owner, str):
        raise InvalidRequest("owner must be a text", field="owner")
    return owner
