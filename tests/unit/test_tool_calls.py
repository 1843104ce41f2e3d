"""Calls of tools in a text: the same whatever pieces it comes in."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.config import Settings
from rakv_cluster.model.grammar import TokenizerGrammars, lark_grammar
from rakv_cluster.serving.generation import ToolCall
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.tool_calls import CLOSE, OPEN, CallSplitter, Tool, calls_lark
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.tiny_models import TOOLS_TEMPLATE, VOCAB_SIZE, tiny_tokenizer

CALL = f'{OPEN}\n{{"name": "f", "arguments": {{"x": "é"}}}}\n{CLOSE}'
PARSED = ToolCall("f", '{"x": "é"}')


def split(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    splitter, shown, calls = CallSplitter(), "", []
    for piece in pieces:
        text, found = splitter.push(piece)
        shown += text
        calls += found
    return shown + splitter.finish(), calls


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("just text", "just text", []),
        (CALL, "", [PARSED]),
        (f"Let me see.\n{CALL}", "Let me see.\n", [PARSED]),
        (f"{CALL}\n{CALL}\n", "", [PARSED, PARSED]),
        (f"{CALL} and so", "and so", [PARSED]),
        (f"{OPEN}nonsense{CLOSE}", f"{OPEN}nonsense{CLOSE}", []),
        (f'{OPEN}["f"]{CLOSE}', f'{OPEN}["f"]{CLOSE}', []),
        (f'{OPEN}{{"name": 5}}{CLOSE}', f'{OPEN}{{"name": 5}}{CLOSE}', []),
        (f'{OPEN}{{"name": "g"}}{CLOSE}', "", [ToolCall("g", "{}")]),
        # A client could not send these back as calls.
        (f'{OPEN}{{"name": "f", "arguments": [1]}}{CLOSE}',) * 2 + ([],),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "\\ud83d"}}}}{CLOSE}',) * 2 + ([],),
        (f"{OPEN}{'[' * 3000}{CLOSE}",) * 2 + ([],),
        (f"{OPEN}cut off", f"{OPEN}cut off", []),
        ("a < b <tool", "a < b <tool", []),
        ("", "", []),
    ],
)
def test_a_text_is_taken_apart(text: str, shown: str, calls: list[ToolCall]) -> None:
    assert split([text]) == split(list(text)) == (shown, calls)


@given(
    parts=st.lists(st.sampled_from([CALL, OPEN, CLOSE, "<", "<tool", "_call>", "x", " ", "{}"])),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_pieces_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]

    assert split(pieces) == split([text])


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_calls_come_one_at_a_time_where_the_client_asks_for_that(
    parallel: bool, stream: bool
) -> None:
    backend = ScriptedBackend(lambda prompt: f"{CALL}\n{CALL}")
    service = scripted_service(backend, Settings(), ManualClock(), chat_template=TOOLS_TEMPLATE)
    app = create_app(service, ServiceMetrics())
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "q"}], "tools": tools, "stream": stream}

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        path = "/v1/chat/completions"
        answer = await http.post(path, json=body | {"parallel_tool_calls": parallel})

    assert answer.status_code == 200, answer.text
    assert answer.text.count('"name":"f"') == (2 if parallel else 1)
    assert '"finish_reason":"tool_calls"' in answer.text


def test_nothing_is_held_back_that_cannot_be_a_call() -> None:
    splitter = CallSplitter()

    assert splitter.push("a <b> c")[0] == "a <b> c"
    assert splitter.push("d<tool")[0] == "d"
    assert splitter.push("x")[0] == "<toolx"


NESTED = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {"Place": {"type": "object", "properties": {"town": {"type": "string"}}}},
}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"name":"f","arguments":{"place":{"town":"Oslo"}}}', True),
        ('{"name":"f","arguments":{"place":"Oslo"}}', False),
        ('{"name":"g","arguments":{}}', True),
        ('{"name":"g","arguments":5}', False),
        ('{"name":"h","arguments":{}}', False),
    ],
)
def test_a_demanded_call_follows_its_tools_own_schema(text: str, allowed: bool) -> None:
    tokenizer = tiny_tokenizer()
    grammars = TokenizerGrammars(tokenizer.backend_tokenizer.to_str(), VOCAB_SIZE, {2})
    mask = grammars(lark_grammar(calls_lark([Tool("f", NESTED), Tool("g", {})]), "tools"))
    ids = tokenizer.encode(f"{OPEN}\n{text}\n{CLOSE}", add_special_tokens=False)

    def follows() -> bool:
        try:
            for token_id in ids:
                mask.accept(token_id)
        except ValueError:
            return False
        return True

    assert follows() == allowed


def test_the_grammar_of_a_call_can_be_enforced() -> None:
    tools = [Tool("f", {"type": "object"}), Tool("g", {})]

    assert "tool_call" in lark_grammar(calls_lark(tools), "tools")
