"""Chats over HTTP whose answers have a known length and are always the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from rakv_cluster.testing.waiting import first_where

CHAT = "/v1/chat/completions"
LASTING: dict[str, Any] = {"max_tokens": 1900, "speculation": "off"}
"""What makes a tiny model's answer last: seconds, of which no drafts that fit save any."""


def chat(**fields: Any) -> dict[str, Any]:
    """A body: a greedy chat of exactly 24 tokens unless told otherwise."""
    return {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The answer to :func:`chat`; raises ``AssertionError`` with what came instead of one."""
    response = http.post(CHAT, json=chat(**fields))
    if response.status_code != httpx.codes.OK:
        raise AssertionError(response.text)
    answer: dict[str, Any] = response.json()
    return answer


def cached_tokens(answer: dict[str, Any]) -> int:
    """How much of the prompt was reused."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def reusing(make: Callable[[], dict[str, Any]], share: float = 0.9) -> dict[str, Any]:
    """The first answer of ``make()`` that reused at least this share of its prompt."""
    return first_where(
        make,
        lambda answer: cached_tokens(answer) >= share * answer["usage"]["prompt_tokens"],
        f"{share:.0%} of the prompt is reused",
    )
