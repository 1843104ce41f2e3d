"""What the OpenAPI description says about answers. Bodies of requests are described where they are
parsed; tests/property/test_openapi.py holds the application to both."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_ERROR_DETAIL = {
    "type": "object",
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "the field that is at fault"},
        "code": {"type": "string"},
    },
    "required": ["message", "type", "param", "code"],
    "additionalProperties": False,
}
_ERROR = {"type": "object", "properties": {"error": _ERROR_DETAIL}, "required": ["error"]}
_STATUSES = {
    400: "the request cannot work as sent",
    401: "no or an unknown API key",
    403: "the key may not do this",
    404: "no such model or endpoint",
    405: "no such method here",
    408: "the request's time ran out",
    413: "the body is too large",
    429: "a queue is full or the tenant's limit is used up",
    500: "a defect; the server's log says more",
    503: "no replica can take the request now",
}

COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
TEXT: dict[str, Any] = {"type": "string"}
NUMBERS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "number"}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "content": _json(_ERROR)}
    for status, meaning in _STATUSES.items()
}
"""Answers that any operation can give."""


def described(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has these properties, and may get more in later versions."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def several(items: dict[str, Any]) -> dict[str, Any]:
    """A list of these."""
    return {"type": "array", "items": items}


def answered(schema: dict[str, Any], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What a route is registered with: its answer where nothing is wrong."""
    content = _json(schema)
    if streams:
        content["text/event-stream"] = {"schema": described(data=TEXT)}
    return {200: {"description": "done", "content": content}}


USAGE = described(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=described(cached_tokens=COUNT),
)
"""A request's accounts in OpenAI's terms."""


def completion(kind: str) -> dict[str, Any]:
    """A generated answer of the object type ``kind``."""
    return described(
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        choices=several(described(index=COUNT, finish_reason=TEXT)),
        usage=USAGE,
        rakv=described(tokens=NUMBERS, timings_ms=NUMBERS),
    )


MODEL = described(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
CHUNK = described(start=COUNT, end=COUNT, nodes=several(TEXT), stored_bytes=COUNT)
REPLICA_TERMS = described(replica=TEXT, expected_ms={"type": "number"}, reused_tokens=COUNT)


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """``null`` means "not given" in every field of a request that may be left out."""
    return {"anyOf": [schema, {"type": "null"}]}


def body_schema(*kinds: type[BaseModel]) -> dict[str, Any]:
    """A body of one of ``kinds``, which is parsed here instead of by FastAPI."""
    schemas = []
    for kind in kinds:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.append(_inlined(schema, schema.pop("$defs", {})))
    whole = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": _json(whole)}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` with its references replaced by what they name, none of ours being recursive, and
    its properties that may be left out nullable."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _inlined(definitions[reference.rsplit("/", 1)[-1]], definitions)
    inlined = {key: _inlined(value, definitions) for key, value in schema.items()}
    if "properties" in inlined:
        needed = inlined.get("required", ())
        inlined["properties"] = {
            name: value if name in needed else nullable(value)
            for name, value in inlined["properties"].items()
        }
    return inlined
