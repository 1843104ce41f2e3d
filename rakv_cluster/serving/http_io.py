"""Bodies of HTTP requests and responses, in one shape for all endpoints."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from rakv_cluster.config import Settings
from rakv_cluster.errors import BodyTooLarge, DeadlineExceeded, RakvError, RequestCancelled
from rakv_cluster.serving.openai_format import error_body


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body; raises :class:`BodyTooLarge` from its announced length, or as soon as what came
    is too long, without taking in the rest, :class:`DeadlineExceeded` if it does not arrive, and
    :class:`RequestCancelled` if the client leaves."""
    try:
        return await asyncio.wait_for(
            _read(request, int(settings.body_limit_bytes)), settings.body_timeout_s
        )
    except asyncio.TimeoutError as error:
        raise DeadlineExceeded(
            f"the request body did not arrive within {settings.body_timeout_s:g} s", field="body"
        ) from error


async def _read(request: Request, limit_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"the request body is larger than {limit_bytes} bytes", field="body")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise too_large
    parts = bytearray()
    try:
        async for part in request.stream():
            parts += part
            if len(parts) > limit_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise RequestCancelled("the client left before the body was there") from error
    return bytes(parts)


def json_response(body: dict[str, Any]) -> Response:
    """``body`` with status 200."""
    return Response(to_json(body), media_type="application/json")


def error_response(error: RakvError, more: Mapping[str, str] = MappingProxyType({})) -> Response:
    """An error in OpenAI's shape, with ``Retry-After`` where it is worth trying again, and
    ``more`` headers."""
    headers = dict(more)
    if error.http_status in {429, 503}:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return Response(
        to_json(error_body(error)),
        status_code=error.http_status,
        headers=headers,
        media_type="application/json",
    )
