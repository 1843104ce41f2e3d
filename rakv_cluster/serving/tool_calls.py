"""Calls of tools in a model's text, in the form that Hermes and Qwen templates teach:

    <tool_call>
    {"name": "...", "arguments": {...}}
    </tool_call>

Pure: text in, text and calls out, however the text is cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from rakv_cluster.model.grammar import refuse_endless
from rakv_cluster.serving.generation import ToolCall, Update

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is a JSON Schema."""

    name: str
    parameters: Mapping[str, Any]


def calls_lark(tools: Sequence[Tool]) -> str:
    """The grammar (llguidance's Lark) of a text that is one call of one of ``tools``.

    Each tool's schema is a document of its own, so that its references (``#/$defs/...``) hold.
    Raises :class:`InvalidRequest` for one of these that no text can end.
    """
    rules = [
        f'start: "{OPEN}\\n" call "\\n{CLOSE}"',
        "call: " + " | ".join(f"call{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        front = json.dumps(f'{{"name":"{tool.name}","arguments":')
        rules.append(f'call{number}: {front} arguments{number} "}}"')
        schema = {"type": "object", **tool.parameters, "x-guidance": {"whitespace_flexible": False}}
        refuse_endless(schema, "tools")
        rules.append(f"arguments{number}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"


class CallSplitter:
    """One choice's text, taken apart as it comes.

    What may still become a call is held back. What looks like one and is none is shown.
    """

    def __init__(self) -> None:
        self._held = ""
        self._trims = False

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Take more text: what to show now, and the calls that are complete now."""
        self._held += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                keep = _overlap(before, OPEN)
                shown.append(self._between(before[: len(before) - keep]))
                self._held = before[len(before) - keep :]
                break
            body, closed, behind = rest.partition(CLOSE)
            shown.append(self._between(before))
            if not closed:
                self._held = opened + rest
                break
            call = _parsed(body)
            if call is None:
                shown.append(self._between(opened + body + closed))
            else:
                calls.append(call)
                self._trims = True
            self._held = behind
        return "".join(shown), tuple(calls)

    def finish(self) -> str:
        """The text is over: what was held back is none."""
        rest, self._held = self._held, ""
        return self._between(rest)

    def _between(self, text: str) -> str:
        """White space behind calls is the template's, not the answer's."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


async def split_calls(
    updates: AsyncGenerator[Update, None], *, parallel: bool = True
) -> AsyncGenerator[Update, None]:
    """Updates whose calls are taken out of the text; a choice that called ends with
    ``tool_calls``. Unless ``parallel``, a choice's first call is its only one."""
    splitters: dict[int, CallSplitter] = {}
    called: set[int] = set()
    async with aclosing(updates):
        async for update in updates:
            splitter = splitters.setdefault(update.index, CallSplitter())
            text, calls = splitter.push(update.text)
            if not parallel:
                calls = () if update.index in called else calls[:1]
            if calls:
                called.add(update.index)
            reason = update.finish_reason
            if reason:
                text += splitter.finish()
                if reason == "stop" and update.index in called:
                    reason = "tool_calls"
            yield replace(update, text=text, calls=calls, finish_reason=reason)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _parsed(body: str) -> ToolCall | None:
    try:
        content = from_json(body, allow_inf_nan=False)  # as what clients send back is parsed
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(content["name"], json.dumps(arguments, ensure_ascii=False))
