"""gRPC's messages to validated requests, and results to messages.

Requests become those of the HTTP surface, so that both have one meaning and one set of checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic_core import from_json

from rakv_cluster.engine.text import TokenBytes
from rakv_cluster.errors import InvalidRequest, UnsupportedParameter
from rakv_cluster.routing.policy import Decision, explain
from rakv_cluster.rpc.v1 import cache_pb2 as cache
from rakv_cluster.rpc.v1 import generation_pb2 as generation
from rakv_cluster.serving.cache_api import ONE_TOKEN, Looked
from rakv_cluster.serving.generation import TokenText, ToolCall
from rakv_cluster.serving.openai_format import Totals, finite
from rakv_cluster.serving.openai_models import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    validated,
)
from rakv_cluster.store.base import StoreStats
from rakv_cluster.telemetry import Figures
from rakv_cluster.types import ReuseMode, TokenLogprob

_OPTIONAL = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "n", "max_kl", "recompute",
)  # fmt: skip
_REUSE = {
    generation.REUSE_EXACT: "exact",
    generation.REUSE_REORDER: "reorder",
    generation.REUSE_BLEND: "blend",
    generation.REUSE_OFF: "off",
}
_MOST_ALTERNATIVES = 20
_FINISH = {
    "": generation.FINISH_REASON_UNSPECIFIED,
    "stop": generation.FINISH_REASON_STOP,
    "length": generation.FINISH_REASON_LENGTH,
    "tool_calls": generation.FINISH_REASON_TOOL_CALLS,
}
_NAMED_TOOL = "function:"


def generation_request(message: generation.GenerateRequest) -> GenerationRequest:
    """A validated request; raises :class:`InvalidRequest` as the HTTP surface does."""
    fields: dict[str, Any] = {
        name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)
    }
    fields |= {
        "model": message.model,
        "stop": list(message.stop),
        "stop_token_ids": list(message.stop_token_ids),
        "logit_bias": {str(token_id): bias for token_id, bias in message.logit_bias.items()},
        "ignore_eos": message.ignore_eos,
    }
    if message.speculation:
        if message.speculation == "trace":
            raise UnsupportedParameter("a trace is told over HTTP alone", field="speculation")
        fields["speculation"] = message.speculation
    if message.documents_order:
        fields["documents_order"] = message.documents_order
    if message.reuse != generation.REUSE_UNSPECIFIED:
        if message.reuse not in _REUSE:
            raise InvalidRequest(f"unknown value {message.reuse}", field="reuse")
        fields["reuse"] = _REUSE[message.reuse]
    if message.json_schema:
        fields["response_format"] = _response_format(message.json_schema)
    if message.HasField("top_logprobs"):
        fields |= _logprob_fields(message)
    if message.tools:
        fields["tools"] = [_tool(tool, f"tools.{n}") for n, tool in enumerate(message.tools)]
    if message.tool_choice:
        fields["tool_choice"] = _tool_choice(message.tool_choice)
    return _with_input(message.input, fields)


def prompt_request(message: generation.Input) -> GenerationRequest:
    """A request that asks for one greedy token: for operations on a prompt's KV."""
    return _with_input(message, dict(ONE_TOKEN))


def _with_input(message: generation.Input, fields: dict[str, Any]) -> GenerationRequest:
    fields["documents"] = [
        {"id": d.id, "text": d.text} if d.text or not d.id else {"id": d.id}
        for d in message.documents
    ]
    if message.HasField("chat"):
        messages = [_message(m) for m in message.chat.messages]
        return validated(ChatRequest, fields | {"messages": messages})
    if message.HasField("prompt"):
        return validated(CompletionRequest, fields | {"prompt": message.prompt})
    if message.HasField("token_ids"):
        return validated(CompletionRequest, fields | {"prompt": list(message.token_ids.ids)})
    raise InvalidRequest("set input.chat, input.prompt or input.token_ids", field="input")


def _message(message: generation.Message) -> dict[str, Any]:
    """In the HTTP surface's form; what is not set is left out, since not every role may have it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    return fields


def _tool(tool: generation.Tool, field: str) -> dict[str, Any]:
    parameters = _json(tool.parameters, f"{field}.parameters") if tool.parameters else {}
    described = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": described}


def _tool_choice(choice: str) -> object:
    if choice.startswith(_NAMED_TOOL):
        return {"type": "function", "function": {"name": choice.removeprefix(_NAMED_TOOL)}}
    return choice


def _response_format(text: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": _json(text, "json_schema")}}


def _json(text: str, field: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{field} is no JSON: {error}", field=field) from error


def _logprob_fields(message: generation.GenerateRequest) -> dict[str, Any]:
    """Each HTTP endpoint has its own names for them."""
    if message.top_logprobs > _MOST_ALTERNATIVES:
        raise InvalidRequest(
            f"'top_logprobs': at most {_MOST_ALTERNATIVES}, not {message.top_logprobs}",
            field="top_logprobs",
        )
    if message.input.HasField("chat"):
        return {"logprobs": True, "top_logprobs": message.top_logprobs}
    return {"logprobs": message.top_logprobs}


def choice(
    index: int,
    text: str,
    finish_reason: str,
    logprobs: Iterable[generation.TokenLogprob],
    calls: Iterable[generation.ToolCall],
) -> generation.Choice:
    """A choice, whole or its next piece; ``finish_reason`` is empty before the end."""
    return generation.Choice(
        index=index,
        text=text,
        finish_reason=_FINISH[finish_reason],
        logprobs=logprobs,
        tool_calls=calls,
    )


def tool_calls(
    calls: Iterable[ToolCall], response_id: str, index: int, *, before: int = 0
) -> Iterator[generation.ToolCall]:
    """Calls of choice ``index``, which has made ``before`` others already."""
    for number, call in enumerate(calls, start=before):
        call_id = f"call_{response_id}_{index}_{number}"
        yield generation.ToolCall(id=call_id, name=call.name, arguments=call.arguments)


def logprobs(
    tokens: Iterable[TokenText], token_bytes: TokenBytes
) -> Iterator[generation.TokenLogprob]:
    """Emitted tokens with their alternatives."""
    for token in tokens:
        top = [_logprob(TokenLogprob(i, value), token_bytes) for i, value in token.logprob.top]
        yield _logprob(token.logprob, token_bytes, top)


def _logprob(
    entry: TokenLogprob, token_bytes: TokenBytes, top: Iterable[generation.TokenLogprob] = ()
) -> generation.TokenLogprob:
    return generation.TokenLogprob(
        token_id=entry.token_id,
        token=token_bytes.of(entry.token_id),
        logprob=finite(entry.logprob),
        top=top,
    )


def usage(totals: Totals, total_ms: float) -> generation.Usage:
    """A request's accounts."""
    return generation.Usage(
        prompt_tokens=totals.prompt_tokens,
        output_tokens=sum(totals.output_tokens.values()),
        cached_tokens=totals.stats.cached_tokens,
        prompt_sources=totals.sources(),
        timings_ms=totals.rakv(total_ms)["timings_ms"],
        document_indices=totals.placed.indices,
        exactness=totals.label(),
        other_numeric_class_tokens=totals.stats.other_class_tokens,
        blend=generation.Blend(**totals.blend()) if totals.reuse is ReuseMode.BLEND else None,
    )


def explanation(prompt_tokens: int, decision: Decision) -> generation.ExplainRouteResponse:
    """How a request would be routed."""
    return generation.ExplainRouteResponse(
        chosen=decision.order[0],
        reason=decision.reason.value,
        measured=decision.scores.measured,
        prompt_tokens=prompt_tokens,
        replicas=[generation.ReplicaTerms(**asdict(terms)) for terms in explain(decision)],
    )


def looked(found: Looked) -> cache.LookupResponse:
    """What a look-up found."""
    return cache.LookupResponse(
        prompt_tokens=found.prompt_tokens,
        stored_tokens=found.stored_tokens,
        chunks=[
            cache.ChunkState(
                start=state.start, end=state.end, nodes=state.nodes, stored_bytes=state.stored_bytes
            )
            for state in found.chunks
        ],
    )


def shard_stats(stats: StoreStats) -> cache.ShardStats:
    """One shard's sizes and counters."""
    return cache.ShardStats(
        records=stats.records,
        stored_bytes=stats.stored_bytes,
        budget_bytes=stats.budget_bytes,
        counters=dict(stats.counters),
    )


def one_replica(by_replica: Mapping[str, Figures]) -> dict[str, float]:
    """The first replica's figures; those with a label as ``name.label``. Empty of none."""
    flat: dict[str, float] = {}
    for name, value in next(iter(by_replica.values()), {}).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{label}": float(number) for label, number in value.items()}
        else:
            flat[name] = float(value)
    return flat
