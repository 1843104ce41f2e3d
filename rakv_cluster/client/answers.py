"""What a service answers, as a client sees it: an answer put together from a stream's lines.

No network here: both clients feed the same :class:`AnswerBuilder`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rakv_cluster.clock import Clock
from rakv_cluster.errors import RakvError, Unavailable, error_class


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    ``finish_reason`` is ``stop`` or ``length``. ``ttft_s`` runs from just before the request is
    sent to the first piece of text, ``total_s`` to the end of the stream, both at the client.
    ``usage`` and ``rakv`` are the server's own accounts, as it sent them.
    """

    text: str
    finish_reason: str
    ttft_s: float
    total_s: float
    usage: Mapping[str, Any]
    rakv: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.usage["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return int(self.usage["completion_tokens"])

    @property
    def sources(self) -> Mapping[str, int]:
        """Prompt tokens by where their KV came from: ``ram``, ``disk``, ..., ``computed``."""
        tokens: Mapping[str, int] = self.rakv["tokens"]
        return tokens

    @property
    def tokens_per_s(self) -> float:
        """Decode rate behind the first token; 0 for answers of one token."""
        elapsed = self.total_s - self.ttft_s
        return (self.output_tokens - 1) / elapsed if self.output_tokens > 1 and elapsed > 0 else 0.0


@dataclass(slots=True)
class EventLines:
    """Lines of a server-sent event stream, from its bytes as they come.

    httpx's own end at U+2028, U+0085 and others too, which JSON texts may hold as they are.
    """

    _rest: bytes = b""

    def push(self, data: bytes) -> list[str]:
        """Take more bytes; the lines that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in whole]


@dataclass(slots=True)
class AnswerBuilder:
    """Takes the lines of one server-sent event stream; ``started_s`` is on ``clock``."""

    clock: Clock
    started_s: float
    ended: bool = False
    _text: list[str] = field(default_factory=list)
    _finish_reason: str = ""
    _first_s: float = -1.0
    _usage: dict[str, Any] = field(default_factory=dict)
    _rakv: dict[str, Any] = field(default_factory=dict)

    def feed(self, line: str) -> str:
        """Take a line; the text it adds, often none.

        Raises what the server reports inside the stream, and :class:`RakvError` for a line that no
        service of ours sends.
        """
        if not line.startswith("data:") or self.ended:
            return ""
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            self.ended = True
            return ""
        try:
            event = json.loads(payload)
            if "error" not in event:
                return self._take(event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RakvError(f"not an event of a completion: {payload[:200]}") from error
        raise error_of(event, status=0)

    def finish(self) -> Answer:
        """The whole answer; raises :class:`Unavailable` if the stream broke off before its end."""
        if not self.ended or not self._finish_reason:
            raise Unavailable("the stream broke off before the answer's end")
        ended_s = self.clock.monotonic_s()
        first_s = self._first_s if self._first_s >= 0 else ended_s
        return Answer(
            text="".join(self._text),
            finish_reason=self._finish_reason,
            ttft_s=first_s - self.started_s,
            total_s=ended_s - self.started_s,
            usage=self._usage,
            rakv=self._rakv,
        )

    def _take(self, event: dict[str, Any]) -> str:
        self._usage = event.get("usage") or self._usage
        self._rakv = event.get("rakv") or self._rakv
        added = ""
        for choice in event["choices"]:
            delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
            added += delta or ""
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        if added:
            if self._first_s < 0:
                self._first_s = self.clock.monotonic_s()
            self._text.append(added)
        return added


def error_of(body: object, *, status: int, retry_after: str = "") -> RakvError:
    """The error tree's class for an OpenAI-shaped error body.

    By its code; else by ``status`` (0: unknown); else :class:`RakvError`. ``retry_after`` is the
    header's value.
    """
    detail = body.get("error") if isinstance(body, dict) else None
    given = detail if isinstance(detail, dict) else {}
    code, field_name = given.get("code"), given.get("param")
    kind = error_class(str(code), lambda k: k.http_status == status != 500)
    message = given.get("message") or f"the server answered with status {status}"
    return kind(
        str(message),
        field=field_name if isinstance(field_name, str) else None,
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
    )
