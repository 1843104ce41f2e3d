"""The HTTP surface: bytes in, OpenAI-shaped JSON or server-sent events out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import rakv_cluster
from rakv_cluster import telemetry
from rakv_cluster.engine.text import TokenBytes
from rakv_cluster.errors import (
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    RakvError,
    Unavailable,
)
from rakv_cluster.serving import openai_format
from rakv_cluster.serving.figures import FIGURES
from rakv_cluster.serving.generation import Update
from rakv_cluster.serving.http_access import Access, caller_of
from rakv_cluster.serving.http_io import error_response, json_response, read_body
from rakv_cluster.serving.openai_format import ChoiceText, Endpoint, Header
from rakv_cluster.serving.openai_models import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from rakv_cluster.serving.openai_tools import offered
from rakv_cluster.serving.openapi import (
    ERRORS,
    MODEL,
    TEXT,
    answered,
    body_schema,
    completion,
    described,
    several,
)
from rakv_cluster.serving.run import Run
from rakv_cluster.serving.service import Service
from rakv_cluster.serving.token_api import add_token_routes
from rakv_cluster.serving.tool_calls import split_calls

log = logging.getLogger("rakv.http")

_DONE = b"data: [DONE]\n\n"
_INTERNAL = RakvError("internal error; the server's log says more")
_PROBE_TIMEOUT_S = 2.0


def create_app(
    service: Service, metrics: telemetry.ServiceMetrics, *, ids_echoed: bool = False
) -> FastAPI:
    """The ASGI application of one ingress process; ``ids_echoed`` as in :class:`Access`."""
    app = FastAPI(
        title="rakv-cluster", version=rakv_cluster.__version__, docs_url=None, responses=ERRORS
    )
    started = int(service.clock.wall_s())
    model = openai_format.model_body(service.model_name, started, service.card.context_tokens)
    _handle_errors(app)
    app.add_middleware(
        Access, gate=service.gate, error_response=error_response, ids_echoed=ids_echoed
    )

    @app.post(
        "/v1/chat/completions",
        openapi_extra=body_schema(ChatRequest),
        responses=answered(completion("chat.completion"), streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        return await _Exchange(service, metrics, "chat").answer(request, ChatRequest)

    @app.post(
        "/v1/completions",
        openapi_extra=body_schema(CompletionRequest),
        responses=answered(completion("text_completion"), streams=True),
    )
    async def completions(request: Request) -> Response:
        return await _Exchange(service, metrics, "completions").answer(request, CompletionRequest)

    @app.get(
        "/v1/models",
        responses=answered(described(object={"const": "list"}, data=several(MODEL))),
    )
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}", responses=answered(MODEL))
    async def get_model(name: str) -> Response:
        if name != model["id"]:
            raise ModelNotFound(f"the model '{name}' does not exist here", field="model")
        return json_response(model)

    @app.get("/healthz", responses=answered(described(status=TEXT)))
    async def healthz() -> Response:
        """This process answers."""
        return json_response({"status": "ok"})

    @app.get("/readyz", responses=answered(described(status=TEXT, model=TEXT)))
    async def readyz() -> Response:
        """A replica answers too."""
        try:
            await asyncio.wait_for(service.backend.describe(), _PROBE_TIMEOUT_S)
        except (asyncio.TimeoutError, RakvError) as error:
            raise Unavailable("no replica is ready", retry_after_s=1.0) from error
        return json_response({"status": "ready", "model": service.model_name})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def render_metrics() -> Response:
        await _read_replicas(service, metrics)
        return Response(metrics.render(), media_type=telemetry.CONTENT_TYPE)

    add_token_routes(app, service)
    return app


class _Exchange:
    """One request and its response."""

    def __init__(
        self, service: Service, metrics: telemetry.ServiceMetrics, endpoint: Endpoint
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._endpoint = endpoint
        self._started_s = service.clock.monotonic_s()

    async def answer(self, http: Request, kind: type[GenerationRequest]) -> Response:
        """Read, validate, run; errors before the first token become the response's status."""
        body = await read_body(http, self._service.settings)
        request = parse(kind, body)
        caller = caller_of(http)
        prepared = await self._service.prepare(request, caller)
        run = Run(
            self._service,
            self._metrics,
            prepared,
            caller,
            endpoint=self._endpoint,
            started_s=self._started_s,
            traceparent=http.headers.get("traceparent", ""),
        )
        prefix = "chatcmpl" if self._endpoint == "chat" else "cmpl"
        header = Header(
            self._endpoint,
            f"{prefix}-{prepared.id}",
            int(self._service.clock.wall_s()),
            self._service.model_name,
        )
        if not request.stream:
            return await self._whole(request, run, header)
        updates = _updates(request, run)
        # Awaited here, so that a refusal still has its status code.
        first = await anext(updates)
        return _Stream(self._events(request, run, header, first, updates), updates)

    async def _whole(self, request: GenerationRequest, run: Run, header: Header) -> Response:
        choices = {choice.index: ChoiceText() for choice in run.prepared.choices}
        async with aclosing(_updates(request, run)) as updates:
            async for update in updates:
                choices[update.index].add(update)
        body = openai_format.full_body(
            header,
            choices,
            self._service.token_bytes,
            with_logprobs=request.alternatives >= 0,
            echo=_echo(request, self._service.token_bytes),
        )
        accounts = {"usage": run.totals.usage(), "rakv": run.totals.rakv(run.elapsed_ms())}
        return json_response(body | accounts)

    async def _events(
        self,
        request: GenerationRequest,
        run: Run,
        header: Header,
        first: Update,
        updates: AsyncGenerator[Update, None],
    ) -> AsyncIterator[bytes]:
        opened: set[int] = set()
        calls: Counter[int] = Counter()

        def event(update: Update) -> bytes:
            body = openai_format.stream_body(
                header,
                update,
                self._service.token_bytes,
                first=update.index not in opened,
                with_logprobs=request.alternatives >= 0,
                echo=_echo(request, self._service.token_bytes),
                calls_before=calls[update.index],
            )
            calls[update.index] += len(update.calls)
            opened.add(update.index)
            return _event(body)

        async with aclosing(updates):
            yield event(first)
            try:
                async for update in updates:
                    if update.text or update.tokens or update.calls or update.finish_reason:
                        yield event(update)
            except RakvError as error:
                yield _event(openai_format.error_body(error))
                return
            except Exception:
                # The status is long sent: what ends without a word looks like a broken connection.
                log.exception("a stream failed")
                yield _event(openai_format.error_body(_INTERNAL))
                return
        if request.stream_options.include_usage:
            yield _event(openai_format.usage_body(header, run.totals, run.elapsed_ms()))
        yield _DONE


class _Stream(StreamingResponse):
    """Server-sent events made of ``updates``, which end with it even if no event was sent."""

    def __init__(self, events: AsyncIterator[bytes], updates: AsyncGenerator[Update, None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._updates = updates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._updates):
            await super().__call__(scope, receive, send)


def _updates(request: GenerationRequest, run: Run) -> AsyncGenerator[Update, None]:
    """A run's updates, calls of tools taken out of the text."""
    if isinstance(request, ChatRequest) and offered(request.tools, request.tool_choice):
        return split_calls(run.updates(), parallel=request.parallel_tool_calls)
    return run.updates()


def _echo(request: GenerationRequest, token_bytes: TokenBytes) -> str:
    """The prompt's text, if it was asked for."""
    if not isinstance(request, CompletionRequest) or not request.echo:
        return ""
    prompt = request.prompt
    return prompt if isinstance(prompt, str) else token_bytes.text(prompt)


async def _read_replicas(service: Service, metrics: telemetry.ServiceMetrics) -> None:
    """Ask all replicas; one that does not answer has no figures in this scrape."""
    figures: Mapping[str, telemetry.Figures] = {}
    with contextlib.suppress(asyncio.TimeoutError, RakvError):
        figures = await asyncio.wait_for(service.backend.stats(), _PROBE_TIMEOUT_S)
    metrics.replicas.update(FIGURES, figures)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RakvError)
    async def known(request: Request, error: RakvError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return error_response(NotFound(f"no such endpoint: {where}"))
        if error.status_code == 405:
            refusal = MethodNotAllowed(f"method not allowed: {where}")
            return error_response(refusal, error.headers or {})
        raise error

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Starlette re-raises it after this response, so the log has the traceback, the client not.
        return error_response(_INTERNAL)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
