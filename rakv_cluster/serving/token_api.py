"""``/tokenize`` and ``/detokenize``: the ids that a prompt would have here, and back."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.serving.http_access import caller_of
from rakv_cluster.serving.http_io import json_response, read_body
from rakv_cluster.serving.openai_models import is_token_ids, parse_object
from rakv_cluster.serving.openapi import COUNT, TEXT, answered, described, several
from rakv_cluster.serving.prompt_body import prompt_request, prompt_schema
from rakv_cluster.serving.service import Service

_TOKENS_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}
                    },
                    "required": ["tokens"],
                    "additionalProperties": False,
                }
            }
        },
    }
}


def add_token_routes(app: FastAPI, service: Service) -> None:
    """Serve both."""

    tokenized = described(count=COUNT, max_model_len=COUNT, tokens=several(COUNT))

    @app.post("/tokenize", openapi_extra=prompt_schema({}), responses=answered(tokenized))
    async def tokenize(request: Request) -> Response:
        """The ids of a prompt as a completion would have them, however long it is."""
        data = parse_object(await read_body(request, service.settings))
        prompt = await service.prompt(prompt_request(data, {}), caller_of(request))
        return json_response(
            {
                "count": len(prompt.token_ids),
                "max_model_len": service.card.context_tokens,
                "tokens": prompt.token_ids,
            }
        )

    @app.post(
        "/detokenize",
        openapi_extra=_TOKENS_SCHEMA,
        responses=answered(described(prompt=TEXT)),
    )
    async def detokenize(request: Request) -> Response:
        """The text of ids; control tokens have none."""
        data = parse_object(await read_body(request, service.settings))
        tokens = data.get("tokens")
        if set(data) != {"tokens"} or not is_token_ids(tokens):
            raise InvalidRequest("send tokens, a list of token ids, alone", field="tokens")
        service.check_ids(tokens, "tokens")
        return json_response({"prompt": service.token_bytes.text(tokens)})
