"""What both HTTP clients share: defaults, and httpx's exceptions and responses in our terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from rakv_cluster.client.answers import error_of
from rakv_cluster.client.retries import RetryPolicy
from rakv_cluster.clock import SystemClock
from rakv_cluster.errors import DeadlineExceeded, InvalidRequest, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RETRIES = RetryPolicy()
SYSTEM_CLOCK = SystemClock()
CONNECTIONS = httpx.Limits(max_connections=256, max_keepalive_connections=64)
_CONNECT_TIMEOUT_S = 5.0


@contextmanager
def translated(url: httpx.URL) -> Iterator[None]:
    """Raise what httpx raises as one of ours."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise Unavailable(f"no connection to {url} in time") from error
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(f"{url} was silent for longer than the timeout") from error
    except httpx.TransportError as error:
        raise Unavailable(f"no answer from {url}: {error}") from error


def posted(
    http: httpx.Client | httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> httpx.Request:
    """A request to be sent; raises :class:`InvalidRequest` for what JSON in UTF-8 cannot say."""
    try:
        return http.build_request("POST", path, json=body)
    except ValueError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def raise_for_error(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        body = response.json()
    except ValueError:
        body = {}
    raise error_of(
        body, status=response.status_code, retry_after=response.headers.get("retry-after", "")
    )


def model_names(response: httpx.Response) -> tuple[str, ...]:
    return tuple(str(model["id"]) for model in response.json()["data"])


def headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
