"""A conversation on the real model: the KV of an answer serves the next turn."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.service import local_service
from rakv_cluster.testing.waiting import eventually

DOCUMENT = {"id": "tides", "text": "The moon pulls the sea; twice a day the water rises. " * 12}


@pytest.mark.model
def test_the_next_turn_reuses_documents_question_and_answer(default_model: LoadedModel) -> None:
    store = MemoryStore(1 << 30, SystemClock())
    settings = load_settings({"price_loads": False}, environ={})
    question = {"role": "user", "content": "What pulls the sea?"}
    fields = {"documents": [DOCUMENT], "max_tokens": 16, "temperature": 0}
    with (
        local_service(default_model, store, settings) as service,
        httpx.Client(base_url=service.url, timeout=120.0) as http,
    ):

        def chat(messages: list[dict[str, str]], reuse: str = "exact") -> dict[str, Any]:
            body = fields | {"messages": messages, "reuse": reuse}
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        first = chat([question])
        said = first["choices"][0]["message"]
        history = [question, {"role": "assistant", "content": said["content"]},
                   {"role": "user", "content": "How often?"}]  # fmt: skip
        # Records are stored behind the answer's back: two chunks, the prompt's tail, the answer's.
        eventually(lambda: store.stats().records >= 4, "the first turn's KV is stored")
        second = chat(history)
        cold = chat(history, "off")

    assert second["choices"] == cold["choices"]
    reached = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= reached - 1
