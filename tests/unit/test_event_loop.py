"""What takes long leaves the event loop, which writes all streams, to others."""

from __future__ import annotations

import json
import threading
from random import Random
from typing import Any

import pytest

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.config import Settings
from rakv_cluster.serving.openai_models import ChatRequest, validated
from rakv_cluster.serving.prompting import PromptRenderer, Rendered
from rakv_cluster.serving.service import Service
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import CARD, ScriptedBackend
from rakv_cluster.testing.tiny_models import TOOLS_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "q"}
TEXT = "x" * 100_000
CALL = {"function": {"name": "f", "arguments": json.dumps({"x": TEXT})}}


class Watched(PromptRenderer):
    """Notes the threads that it works in."""

    threads: set[int]

    def chat(self, *given: Any) -> Rendered:
        self.threads.add(threading.get_ident())
        return super().chat(*given)


@pytest.mark.parametrize(
    ("fields", "here"),
    [
        ({}, True),
        ({"messages": [USER | {"content": TEXT}]}, False),
        ({"documents": [{"text": TEXT}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": TEXT}}]}, False),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}, False),
    ],
    ids=["short", "message", "document", "tools", "call"],
)
async def test_only_what_is_short_is_tokenized_on_the_event_loop(
    fields: dict[str, Any], here: bool
) -> None:
    tokenizer = tiny_tokenizer(TOOLS_TEMPLATE)
    renderer = Watched(tokenizer)
    renderer.threads = set()
    service = Service(
        settings=Settings(),
        backend=ScriptedBackend(),
        card=CARD,
        renderer=renderer,
        cuts=CutTable.from_tokenizer(tokenizer),
        clock=ManualClock(),
        seeds=Random(0),
    )

    await service.prepare(validated(ChatRequest, {"messages": [USER], **fields}))

    assert renderer.threads
    assert (threading.get_ident() in renderer.threads) == here
