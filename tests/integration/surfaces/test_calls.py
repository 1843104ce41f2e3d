"""Tools: the same calls over both surfaces, from a model that must be made to call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.testing.surfaces import Piece, Surface

from .test_generation import USER, chat

pytestmark = pytest.mark.cluster

TOOL_SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Kyōto"]}},
    "required": ["town"],
    "additionalProperties": False,
}


def tools(**fields: Any) -> dict[str, Any]:
    offered = [(name, json.dumps(TOOL_SCHEMA)) for name in ("weather", "tides")]
    given = {"tools": offered, "ignore_eos": False, "max_tokens": 200, "temperature": 1.0}
    return chat(**given | fields)


def test_a_demanded_call_is_made_with_arguments_that_fit(surface: Surface) -> None:
    for seed, choice in enumerate(["required", "function:tides", "required"]):
        reply = surface.ask(**tools(tool_choice=choice, seed=seed))

        assert (reply.text, reply.finish_reasons) == ("", ("tool_calls",))
        (((name, arguments),),) = reply.calls
        assert name in ({"tides"} if choice == "function:tides" else {"weather", "tides"})
        assert json.loads(arguments)["town"] in {"Oslo", "Kyōto"}


def test_a_stream_has_the_call_that_the_whole_answer_has(surface: Surface) -> None:
    fields = tools(tool_choice="required", seed=3, n=2)
    reply = surface.ask(**fields)

    with surface.stream(**fields) as events:
        pieces = [event for event in events if isinstance(event, Piece)]

    assert not "".join(piece.text for piece in pieces)
    for index in (0, 1):
        calls = [call for piece in pieces if piece.index == index for call in piece.calls]
        assert tuple(calls) == reply.calls[index]
        ends = [piece.finish_reason for piece in pieces if piece.index == index]
        assert [end for end in ends if end] == ["tool_calls"]


def test_calls_and_their_answers_are_part_of_the_prompt(surface: Surface) -> None:
    call = {"id": "c", "function": {"name": "tides", "arguments": '{"town": "Oslo"}'}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c", "content": "It is high."}]

    plain = surface.ask(**tools(max_tokens=1)).usage.prompt_tokens
    untold = surface.ask(**tools(max_tokens=1, tool_choice="none")).usage.prompt_tokens
    longer = surface.ask(**tools(max_tokens=1, messages=[*USER, *turns])).usage.prompt_tokens

    assert untold + 2 * len("weather") < plain < longer - len("It is high.")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "function:gone"}, "tool_choice"),
        ({"tools": [("twice", "{}"), ("twice", "{}")]}, "tools"),
        ({"tools": [("a b", "{}")]}, "tools.0.function.name"),
    ],
)
def test_tools_that_cannot_work_name_the_field(
    surface: Surface, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        surface.ask(**tools(**fields))
    assert caught.value.field == field
