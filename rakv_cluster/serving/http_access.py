"""The gate in front of every HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rakv_cluster.errors import RakvError
from rakv_cluster.logs import HEADER, begin_request
from rakv_cluster.serving.auth import Caller, Gate, bearer

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/dashboard"})
"""Answer without a key: load balancers have none, nor has a browser that opens an empty page."""
ADMIN_PATHS = frozenset({"/metrics", "/dashboard/data"})
"""Show the use of all tenants together."""
_COUNTED_METHOD = "POST"


class Access:
    """ASGI middleware: finds the caller, keeps the tenant's limits, up to the response's end.

    ``ids_echoed``: a proxy in front gives every request an id and sends it back itself, as Ray
    Serve's does.

    A middleware of its own instead of FastAPI's dependencies: those are left before a streamed
    response has been sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        error_response: Callable[[RakvError], Response],
        ids_echoed: bool,
    ) -> None:
        self._app = app
        self._gate = gate
        self._error_response = error_response
        self._ids_echoed = ids_echoed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; only HTTP ones are guarded, there are no others here."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = begin_request(given)
        # A second header of the same value would reach clients as "ID, ID".
        if not (self._ids_echoed and request_id == given):
            send = _with_header(send, HEADER, request_id)
        try:
            caller = await self._gate.authenticate(
                bearer(Headers(scope=scope).get("authorization", ""))
            )
            if scope["path"] in ADMIN_PATHS:
                caller.require_admin()
            scope.setdefault("state", {})["caller"] = caller
            if scope["method"] != _COUNTED_METHOD:
                await self._app(scope, receive, send)
                return
            with self._gate.admit(caller):
                await self._app(scope, receive, send)
        except RakvError as error:
            # The application answers its own errors: this one was raised here, before it began.
            await self._error_response(error)(scope, receive, send)


def _with_header(send: Send, name: str, value: str) -> Send:
    """``send`` that adds a header to the response."""

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return adding


def caller_of(request: Request) -> Caller:
    """Who sent a request that passed :class:`Access`."""
    caller = request.state.caller
    if not isinstance(caller, Caller):
        raise TypeError("the request did not pass the gate")
    return caller
