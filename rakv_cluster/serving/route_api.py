"""``POST /v1/route/explain``: where a request would go now, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response

from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.routing.policy import Decision, explain
from rakv_cluster.serving.http_access import caller_of
from rakv_cluster.serving.http_io import json_response, read_body
from rakv_cluster.serving.openai_models import (
    ChatRequest,
    CompletionRequest,
    parse_object,
    validated,
)
from rakv_cluster.serving.openapi import (
    COUNT,
    REPLICA_TERMS,
    TEXT,
    answered,
    body_schema,
    described,
    several,
)
from rakv_cluster.serving.service import Service


class Explains(Protocol):
    """What knows how requests are routed."""

    async def explain(self, request: EngineRequest) -> Decision:
        """How ``request`` would be routed now."""
        ...


def add_route_explanation(app: FastAPI, service: Service, replicas: Explains) -> None:
    """Add the endpoint. Its body is that of a chat completion (with ``messages``) or of a
    completion; nothing is generated."""

    answer = described(
        chosen=TEXT,
        reason=TEXT,
        measured={"type": "boolean"},
        prompt_tokens=COUNT,
        replicas=several(REPLICA_TERMS),
    )

    @app.post(
        "/v1/route/explain",
        openapi_extra=body_schema(ChatRequest, CompletionRequest),
        responses=answered(answer),
    )
    async def explain_route(http: Request) -> Response:
        data = parse_object(await read_body(http, service.settings))
        kind = ChatRequest if "messages" in data else CompletionRequest
        prepared = await service.prepare(validated(kind, data), caller_of(http))
        request = prepared.choices[0].request
        decision = await replicas.explain(request)
        return json_response(explanation(request, decision))


def explanation(request: EngineRequest, decision: Decision) -> dict[str, Any]:
    """The answer's body; times in milliseconds."""
    return {
        "chosen": decision.order[0],
        "reason": decision.reason.value,
        "measured": decision.scores.measured,
        "prompt_tokens": len(request.prompt.token_ids),
        "replicas": [asdict(terms) for terms in explain(decision)],
    }
