"""Chats over HTTP whose answers have a known length and are always the same."""

from __future__ import annotations

from typing import Any

import httpx

CHAT = "/v1/chat/completions"


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
