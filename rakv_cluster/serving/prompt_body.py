"""HTTP bodies that name a prompt and ask for no answer: what to do with its tokens or its KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rakv_cluster.config import nearest
from rakv_cluster.errors import InvalidRequest
from rakv_cluster.serving.cache_api import ONE_TOKEN
from rakv_cluster.serving.openai_models import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    validated,
)
from rakv_cluster.serving.openapi import nullable

_PROMPT_FIELDS: Mapping[str, dict[str, Any]] = {
    "model": nullable({"type": "string"}),
    "messages": {"type": "array", "description": "as in /v1/chat/completions"},
    "prompt": {"description": "as in /v1/completions, instead of messages"},
    "documents": nullable({"type": "array", "description": "as in /v1/chat/completions"}),
}


def prompt_request(data: Mapping[str, Any], more: Mapping[str, object]) -> GenerationRequest:
    """A request for one greedy token after the prompt in ``data``, which may have the fields
    ``more`` besides. Raises :class:`InvalidRequest` that names the field."""
    known = {**_PROMPT_FIELDS, **more}
    for name in data:
        if name not in known:
            raise InvalidRequest(f"unknown field '{name}'{nearest(name, known)}", field=name)
    fields = {name: value for name, value in data.items() if name in _PROMPT_FIELDS}
    kind = ChatRequest if "messages" in data else CompletionRequest
    return validated(kind, {**fields, **ONE_TOKEN})


def prompt_schema(more: Mapping[str, object]) -> dict[str, Any]:
    """OpenAPI's description of such a body; ``more`` are schemas of required fields."""
    schema = {
        "type": "object",
        "properties": {**_PROMPT_FIELDS, **more},
        "required": list(more),
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
