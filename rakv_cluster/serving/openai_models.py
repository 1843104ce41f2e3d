"""OpenAI's request bodies as this server accepts them, and why one is refused.

Three kinds of field: those that work; those known to OpenAI whose *neutral* value changes nothing
and is accepted, while any other value is refused as unsupported instead of being ignored; and
unknown ones, refused with the nearest known name. ``null`` means "not given".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, from_json

from rakv_cluster.config import nearest
from rakv_cluster.errors import InvalidRequest, UnsupportedParameter
from rakv_cluster.serving.openai_tools import (
    ResponseFormat,
    Strict,
    ToolCallIn,
    ToolChoice,
    ToolIn,
    check_calls,
    check_names,
    demanded,
)


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _join_text_parts(value: object) -> object:
    """OpenAI's list of ``{"type": "text", "text": ...}`` parts as one text, a line per part."""
    if isinstance(value, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in value
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("must be a text or a list of text parts; other parts do not work here")
        return "\n".join(str(part) for part in parts)
    return value


def _must_be_off(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    """Whether this is a list of numbers that can be token ids; of which vocabulary is not asked."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _one_prompt(value: object) -> str | tuple[int, ...]:
    """``prompt`` as a text or as token ids, or a list that holds exactly one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if is_token_ids(value) and value:
        return tuple(value)
    raise ValueError("must be one text or one list of token ids, and not empty")


LONGEST_DOCUMENT_ID = 512
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        _IDS_SCHEMA,
        {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA]}, "maxItems": 1},
    ]
}
_TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART_SCHEMA}],
}
_STOP_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 256}
_STOP_SCHEMA = {
    "anyOf": [_STOP_TEXT_SCHEMA, {"type": "array", "items": _STOP_TEXT_SCHEMA, "maxItems": 16}]
}


class MessageIn(Strict):
    """One chat message; ``content`` may be missing where an assistant called tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(_join_text_parts), WithJsonSchema(_CONTENT_SCHEMA)
    ] = None
    tool_calls: list[ToolCallIn] = Field(default_factory=list, max_length=128)
    tool_call_id: str = Field("", max_length=128)
    name: str = Field("", max_length=128)  # for the chat template
    # What an answer's message has besides, in OpenAI's client: conversations are sent back.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """The content; empty if there is none."""
        return self.content or ""


class DocumentIn(Strict):
    """One document; ``id`` is shown to the model as its name. Without ``text`` it is the one that
    was left under this id (``/v1/documents``)."""

    text: str = Field("", min_length=1)
    id: str = Field("", max_length=LONGEST_DOCUMENT_ID)


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: Annotated[
        bool, AfterValidator(_must_be_off), WithJsonSchema({"const": False})
    ] = False


LogitBias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class GenerationRequest(Strict):
    """Fields that both endpoints share. A limit of 0 stands for "not given"."""

    model: str = ""
    documents: list[DocumentIn] = Field(default_factory=list)
    documents_order: Literal["given", "cached", "canonical"] | None = None
    reuse: Literal["exact", "reorder", "blend", "off"] | None = None
    max_kl: float | None = Field(None, gt=0, le=100)
    recompute: float | None = Field(None, ge=0, le=1)
    speculation: Literal["auto", "off", "1", "2", "4", "8", "trace"] | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    stop: Annotated[
        list[StopString],
        BeforeValidator(_one_or_many),
        Field(max_length=16),
        WithJsonSchema(_STOP_SCHEMA),
    ] = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    # A factor of scores: what is close to 0 would make them infinite.
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], LogitBias] = Field(
        default_factory=dict, max_length=1024
    )
    max_tokens: int = Field(0, ge=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    timeout_s: float | None = Field(None, gt=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)

    @property
    def output_limit(self) -> int:
        """Most tokens to generate; 0 if the request does not say."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The field that :attr:`output_limit` comes from."""
        return "max_tokens"

    @property
    def alternatives(self) -> int:
        """Alternatives wanted per token beside its own log-probability; -1: neither."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[MessageIn] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    max_completion_tokens: int = Field(0, ge=1)
    tools: list[ToolIn] = Field(default_factory=list, max_length=128)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def output_limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def alternatives(self) -> int:
        return self.top_logprobs if self.logprobs else -1


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | tuple[int, ...], PlainValidator(_one_prompt), WithJsonSchema(_PROMPT_SCHEMA)
    ]
    logprobs: int = Field(-1, ge=0, le=20)
    echo: bool = False

    @property
    def alternatives(self) -> int:
        return self.logprobs


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _one_of(*neutral: object) -> Callable[[object], bool]:
    return lambda value: any(value == v and type(value) is type(v) for v in neutral)


_NEUTRAL: Mapping[str, Callable[[object], bool]] = {
    # Labels that change no output.
    "user": _is(str),
    "safety_identifier": _is(str),
    "prompt_cache_key": _is(str),
    "metadata": _is(dict),
    # Switches in the position in which they change no output.
    "store": _one_of(False),
    "service_tier": _one_of("auto", "default"),
    "tools": _one_of([]),
    "functions": _one_of([]),
    "tool_choice": _one_of("none", "auto"),
    "function_call": _one_of("none", "auto"),
    "parallel_tool_calls": _one_of(True, False),
    "modalities": _one_of(["text"]),
    "audio": _one_of(),
    "prediction": _one_of(),
    "reasoning_effort": _one_of("none"),
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
    "prompt_cache_retention": _one_of("in_memory", "in-memory"),
    "suffix": _one_of(""),
    "best_of": _one_of(1),
}

_Request = TypeVar("_Request", bound=GenerationRequest)


def parse(kind: type[_Request], body: bytes) -> _Request:
    """A body to a validated request.

    Raises :class:`InvalidRequest` (bad JSON, wrong type or range, unknown field, conflict) or
    :class:`UnsupportedParameter`; both name the field where there is one.
    """
    return validated(kind, parse_object(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """A body to its JSON object; raises :class:`InvalidRequest`."""
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    return data


def validated(kind: type[_Request], data: Mapping[str, Any]) -> _Request:
    """Named fields to a validated request; raises as :func:`parse` does."""
    given = _known(kind, data)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _translate(kind, error.errors(include_url=False, include_context=False)[0]) from error
    _check_combinations(request)
    return request


def _known(kind: type[GenerationRequest], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields to validate: without nulls and neutral ones."""
    given: dict[str, Any] = {}
    for name, value in data.items():
        if value is None:
            if name not in kind.model_fields and name not in _NEUTRAL:
                raise _unknown(kind, name, name)
        elif name in _NEUTRAL and name not in kind.model_fields:
            if not _NEUTRAL[name](value):
                raise UnsupportedParameter(
                    f"'{name}' with this value is not supported by this server", field=name
                )
        else:
            given[name] = value
    return given


def _check_combinations(request: GenerationRequest) -> None:
    for index, document in enumerate(request.documents):
        if not document.text and not document.id:
            field = f"documents.{index}.text"
            raise InvalidRequest(f"missing field '{field}'", field=field)
    if request.min_tokens > (request.output_limit or request.min_tokens):
        raise InvalidRequest("min_tokens is larger than max_tokens", field="min_tokens")
    if request.max_kl is not None and request.recompute is not None:
        raise InvalidRequest("send max_kl or recompute, not both", field="recompute")
    if isinstance(request, ChatRequest):
        limits = {request.max_tokens, request.max_completion_tokens} - {0}
        if len(limits) > 1:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; send one", field="max_tokens"
            )
        _check_tools(request)
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs >= 0:
        raise UnsupportedParameter(
            "log-probabilities of the prompt are not supported: send echo or logprobs, not both",
            field="echo",
        )
    _check_format(request)
    if request.stream_options.include_usage and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", field="stream_options")


def _check_tools(request: ChatRequest) -> None:
    for index, message in enumerate(request.messages):
        field = f"messages.{index}"
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest("only an assistant calls tools", field=f"{field}.tool_calls")
        if message.content is None and not message.tool_calls:
            raise InvalidRequest(f"missing field '{field}.content'", field=f"{field}.content")
        check_calls(message.tool_calls, f"{field}.tool_calls")
    check_names(request.tools)
    if not demanded(request.tools, request.tool_choice):
        return
    if request.response_format is not None and request.response_format.enforced is not None:
        raise InvalidRequest(
            "a call that must be made leaves no place for a response_format", field="tool_choice"
        )
    if request.ignore_eos or request.min_tokens:
        field = "ignore_eos" if request.ignore_eos else "min_tokens"
        raise InvalidRequest("a call that must be made decides how long a text is", field=field)


def _check_format(request: GenerationRequest) -> None:
    wanted = request.response_format
    if wanted is None:
        return
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise InvalidRequest(
            "type json_schema and the field json_schema need each other",
            field="response_format.json_schema",
        )
    if wanted.enforced is None:
        return
    if request.ignore_eos:
        raise InvalidRequest("a text that must end cannot ignore its end", field="ignore_eos")
    if request.min_tokens:
        raise InvalidRequest("a response_format decides how long a text is", field="min_tokens")


def _translate(kind: type[GenerationRequest], error: ErrorDetails) -> InvalidRequest:
    field = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        return _unknown(kind, name, field)
    if error["type"] == "missing":
        return InvalidRequest(f"missing field '{field}'", field=field)
    message = error["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"'{field}': {message}", field=field)


def _unknown(kind: type[GenerationRequest], name: str, field: str) -> InvalidRequest:
    hint = nearest(name, kind.model_fields) if name == field else ""
    return InvalidRequest(f"unknown field '{field}'{hint}", field=field)
