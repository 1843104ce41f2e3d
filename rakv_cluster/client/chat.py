"""Stream one chat completion over HTTP and time it where the user sits: at the client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from rakv_cluster.clock import Clock
from rakv_cluster.errors import RakvError, Unavailable


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer as the client saw it.

    ``ttft_s`` runs from just before the request is sent to the first piece of text, ``total_s``
    to the end of the stream. ``usage`` and ``rakv`` are the server's own accounts.
    """

    text: str
    finish_reason: str
    ttft_s: float
    total_s: float
    usage: dict[str, Any]
    rakv: dict[str, Any]

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return int(self.usage["completion_tokens"])

    @property
    def tokens_per_s(self) -> float:
        """Decode rate behind the first token; 0 for answers of one token."""
        elapsed = self.total_s - self.ttft_s
        return (self.output_tokens - 1) / elapsed if self.output_tokens > 1 and elapsed > 0 else 0.0


def stream_chat(
    client: httpx.Client,
    body: dict[str, Any],
    *,
    clock: Clock,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """POST ``body`` to ``/v1/chat/completions`` as a stream and collect it.

    Raises :class:`Unavailable` if no server answers and :class:`RakvError` with the server's
    message if it refuses or the stream ends with an error.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text: list[str] = []
    finish_reason, usage, rakv = "", dict[str, Any](), dict[str, Any]()
    started_s = clock.monotonic_s()
    first_s = -1.0
    try:
        with client.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.is_error:
                response.read()
                raise RakvError(_message(response))
            for event in _events(response):
                if "error" in event:
                    raise RakvError(str(event["error"].get("message", "stream failed")))
                usage = event.get("usage") or usage
                rakv = event.get("rakv") or rakv
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and first_s < 0:
                        first_s = clock.monotonic_s()
                    text.append(piece)
                    on_text(piece)
                    finish_reason = choice["finish_reason"] or finish_reason
    except httpx.TransportError as error:
        raise Unavailable(f"no answer from {client.base_url}: {error}") from error
    ended_s = clock.monotonic_s()
    return Answer(
        text="".join(text),
        finish_reason=finish_reason,
        ttft_s=(first_s if first_s >= 0 else ended_s) - started_s,
        total_s=ended_s - started_s,
        usage=usage,
        rakv=rakv,
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Decoded ``data:`` events of a server-sent event stream, up to ``[DONE]``."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            payload = line.removeprefix("data:").strip()
            if payload == "[DONE]":
                return
            yield json.loads(payload)


def _message(response: httpx.Response) -> str:
    """The server's own words for an error, or its status line."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} {response.reason_phrase}"
