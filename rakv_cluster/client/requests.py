"""What a client asks, in the terms of the HTTP surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

Role = Literal["system", "developer", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text that the question is about; ``id`` is shown to the model as its name. An empty text
    stands for the one that was left under this id (``/v1/documents``)."""

    text: str
    id: str = ""


class Options(TypedDict, total=False):
    """Fields of a request that may be left out; the server checks their values.

    Choices (``n``) and log-probabilities are not among them: use OpenAI's own client for those.
    """

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    documents_order: Literal["given", "cached", "canonical"]
    reuse: Literal["exact", "reorder", "blend", "off"]
    max_kl: float
    recompute: float
    speculation: Literal["auto", "off", "1", "2", "4", "8", "trace"]


def chat_body(
    messages: str | Sequence[Message], documents: Sequence[Document], options: Options
) -> dict[str, Any]:
    """The body of a streamed chat request; a text alone is the user's message."""
    given = [Message("user", messages)] if isinstance(messages, str) else messages
    parts = [{"role": m.role, "content": m.content} for m in given]
    return {**options, "messages": parts, **_common(documents)}


def completion_body(prompt: str, documents: Sequence[Document], options: Options) -> dict[str, Any]:
    """The body of a streamed request to go on with ``prompt``."""
    return {**options, "prompt": prompt, **_common(documents)}


def _common(documents: Sequence[Document]) -> dict[str, Any]:
    return {
        "documents": [
            {"id": d.id, "text": d.text} if d.text or not d.id else {"id": d.id} for d in documents
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
