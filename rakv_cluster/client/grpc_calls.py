"""What both gRPC clients share: requests as messages, statuses as errors, answers from events.

No channel here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from rakv_cluster.client.answers import Answer
from rakv_cluster.client.requests import Document, Message, Options
from rakv_cluster.clock import Clock
from rakv_cluster.errors import InvalidRequest, Unavailable
from rakv_cluster.rpc.status import DETAILS_KEY, error_from
from rakv_cluster.rpc.v1 import generation_pb2 as generation

DEFAULT_TARGET = "127.0.0.1:8001"
_REUSE = {
    "exact": generation.REUSE_EXACT,
    "reorder": generation.REUSE_REORDER,
    "blend": generation.REUSE_BLEND,
    "off": generation.REUSE_OFF,
}
_FINISH = {
    generation.FINISH_REASON_STOP: "stop",
    generation.FINISH_REASON_LENGTH: "length",
    generation.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True)
class GrpcAnswerBuilder:
    """Takes the events of one stream; ``started_s`` is on ``clock``."""

    clock: Clock
    started_s: float
    _text: list[str] = field(default_factory=list)
    _finish_reason: str = ""
    _first_s: float = -1.0
    _usage: list[generation.Usage] = field(default_factory=list)

    def feed(self, event: generation.GenerateStreamResponse) -> str:
        """Take an event; the text it adds, sometimes none."""
        if event.HasField("usage"):
            self._usage.append(event.usage)
            return ""
        self._finish_reason = _FINISH.get(event.delta.finish_reason, "")
        if event.delta.text and self._first_s < 0:
            self._first_s = self.clock.monotonic_s()
        self._text.append(event.delta.text)
        return event.delta.text

    def finish(self) -> Answer:
        """The whole answer; raises :class:`Unavailable` if the stream broke off before its end."""
        if not self._usage:
            raise Unavailable("the stream broke off before the answer's end")
        usage = self._usage[-1]
        ended_s = self.clock.monotonic_s()
        first_s = self._first_s if self._first_s >= 0 else ended_s
        return Answer(
            text="".join(self._text),
            finish_reason=self._finish_reason,
            ttft_s=first_s - self.started_s,
            total_s=ended_s - self.started_s,
            usage={
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.output_tokens,
                "total_tokens": usage.prompt_tokens + usage.output_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
            rakv={
                "exactness": usage.exactness,
                "other_numeric_class_tokens": usage.other_numeric_class_tokens,
                "tokens": dict(usage.prompt_sources),
                "blend": _blend(usage.blend),
                "documents": {"indices": list(usage.document_indices)},
                "timings_ms": dict(usage.timings_ms),
            },
        )


def chat_input(
    messages: str | Sequence[Message], documents: Sequence[Document]
) -> generation.Input:
    given = [Message("user", messages)] if isinstance(messages, str) else messages
    with _held("messages"):
        chat = generation.Chat(
            messages=[generation.Message(role=m.role, content=m.content) for m in given]
        )
    return generation.Input(chat=chat, documents=_documents(documents))


def prompt_input(prompt: str, documents: Sequence[Document]) -> generation.Input:
    with _held("prompt"):
        return generation.Input(prompt=prompt, documents=_documents(documents))


def _documents(documents: Sequence[Document]) -> list[generation.Document]:
    with _held("documents"):
        return [generation.Document(id=d.id, text=d.text) for d in documents]


def generate_request(given: generation.Input, options: Options) -> generation.GenerateRequest:
    """Raises :class:`InvalidRequest` for values that the message cannot hold."""
    request = generation.GenerateRequest(input=given)
    for name, value in options.items():
        with _held(name):
            fields: dict[str, Any] = {name: _as_field(name, value)}
            request.MergeFrom(generation.GenerateRequest(**fields))
    return request


def _as_field(name: str, value: Any) -> Any:
    """An option as its field of the message has it."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name == "reuse":
        if value not in _REUSE:
            raise ValueError(f"must be one of {', '.join(_REUSE)}")
        return _REUSE[value]
    if name == "logit_bias":
        return {int(token): bias for token, bias in value.items()}
    return value


@contextmanager
def _held(field: str) -> Iterator[None]:
    """Raise :class:`InvalidRequest` for a value that a message cannot hold."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"'{field}': {error}", field=field) from error


@contextmanager
def translated() -> Iterator[None]:
    """Raise a status as the error it stands for."""
    try:
        yield
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            raise
        trailing = dict(error.trailing_metadata() or ())
        details = trailing.get(DETAILS_KEY, b"")
        raw = details if isinstance(details, bytes) else b""
        raise error_from(error.code(), error.details() or "", raw) from error


def _blend(told: generation.Blend) -> dict[str, Any]:
    """As the HTTP surface has it."""
    return {
        "approximate": told.approximate,
        "repaired_tokens": told.repaired_tokens,
        "repaired_fraction": told.repaired_fraction,
        "expected_kl": told.expected_kl if told.HasField("expected_kl") else None,
        "refusal": told.refusal,
        "probed": told.probed,
    }
