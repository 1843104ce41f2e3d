"""``/v1/documents``: leave a text, have its KV computed, name it by id from then on."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.document_registry import (
    LeftDocument,
    check_size,
    unknown_document,
)
from rakv_cluster.serving.http_access import caller_of
from rakv_cluster.serving.http_io import json_response, read_body
from rakv_cluster.serving.openai_models import LONGEST_DOCUMENT_ID, parse_object
from rakv_cluster.serving.openapi import COUNT, TEXT, USAGE, answered, described, several
from rakv_cluster.serving.prompt_body import prompt_request
from rakv_cluster.serving.service import Service

_FIELDS = ("id", "text", "system")
_BODY = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": LONGEST_DOCUMENT_ID},
        "text": {"type": "string", "minLength": 1},
        "system": {
            "type": "string",
            "description": "system message of the requests that will name it: what stands in front "
            "of a document is part of its KV",
        },
    },
    "required": ["id", "text"],
    "additionalProperties": False,
}
_PARTS = {"id": TEXT, "object": {"const": "document"}, "created": COUNT, "characters": COUNT}
_DOCUMENT = described(**_PARTS)


def add_document_routes(app: FastAPI, service: Service, cache: CacheApi) -> None:
    """Serve them."""
    schema = {"application/json": {"schema": _BODY}}

    @app.post(
        "/v1/documents",
        openapi_extra={"requestBody": {"required": True, "content": schema}},
        responses=answered(described(**_PARTS, usage=USAGE)),
    )
    async def leave(request: Request) -> Response:
        """Compute a document's KV and keep its text for requests that name it."""
        data = parse_object(await read_body(request, service.settings))
        name, text, system = _checked(data)
        caller = caller_of(request)
        document = LeftDocument(name, text, service.clock.wall_s())
        check_size(document, int(service.settings.documents_budget_bytes))
        front = [{"role": "system", "content": system}] if system else []
        messages = [*front, {"role": "user", "content": "?"}]
        documents = [{"id": name, "text": text}]
        warmed = prompt_request({"messages": messages, "documents": documents}, {})
        try:
            totals = await cache.warm(warmed, caller)
        except InvalidRequest as error:
            field = "system" if error.field == "messages.0.content" else "text"
            raise type(error)(error.message, field=field) from error
        await service.documents.leave(caller.tenant, document)
        return json_response({**_shown(document), "usage": totals.usage()})

    @app.get(
        "/v1/documents",
        responses=answered(described(object={"const": "list"}, data=several(_DOCUMENT))),
    )
    async def list_documents(request: Request) -> Response:
        """The caller's documents."""
        kept = await service.documents.all(caller_of(request).tenant)
        return json_response({"object": "list", "data": [_shown(document) for document in kept]})

    @app.get("/v1/documents/{name:path}", responses=answered(_DOCUMENT))
    async def show(request: Request, name: str) -> Response:
        """One of the caller's documents."""
        kept = await service.documents.get(caller_of(request).tenant, name)
        return json_response(_shown(kept))

    @app.delete(
        "/v1/documents/{name:path}",
        responses=answered(described(id=TEXT, deleted={"const": True})),
    )
    async def remove(request: Request, name: str) -> Response:
        """Forget one of the caller's documents; its KV stays until it is evicted."""
        if not await service.documents.remove(caller_of(request).tenant, name):
            raise unknown_document(name)
        return json_response({"id": name, "object": "document", "deleted": True})


def _checked(data: dict[str, Any]) -> tuple[str, str, str]:
    """Id, text and system message; raises :class:`InvalidRequest` that names the field."""
    for field in data:
        if field not in _FIELDS:
            raise InvalidRequest(f"unknown field '{field}'", field=field)
    name, text, system = (data.get(field, "") for field in _FIELDS)
    for field, value, least in (("id", name, 1), ("text", text, 1), ("system", system, 0)):
        if not isinstance(value, str) or len(value) < least:
            raise InvalidRequest(f"{field} must be a text", field=field)
    if len(name) > LONGEST_DOCUMENT_ID:
        raise InvalidRequest(f"id may have {LONGEST_DOCUMENT_ID} characters", field="id")
    return name, text, system


def _shown(document: LeftDocument) -> dict[str, Any]:
    return {
        "id": document.id,
        "object": "document",
        "created": int(document.created_s),
        "characters": len(document.text),
    }
