"""Schemas whose references lead in a circle: refused if no text can end it, and only then."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.model.grammar import schema_grammar
from rakv_cluster.model.schema_cycles import endless_reference

LINK: dict[str, Any] = {"$ref": "#/$defs/a"}


def holding(inner: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """An object whose property ``next`` is ``inner``."""
    return {
        "type": "object", "properties": {"next": inner}, "required": list(required),
        "additionalProperties": False, **more,
    }  # fmt: skip


ENDLESS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "a pair": {**LINK, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": LINK}},
    "all of": {"allOf": [{"$ref": "#"}]},
    "any of": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    "an object in itself": holding({"$ref": "#"}, "next"),
    "as an additional property": {
        "type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"},
    },
    "a list of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a tuple": {"type": ["array"], "prefixItems": [{"$ref": "#"}], "minItems": 1, "items": False},
    "object or list": {
        "type": ["object", "array"], "items": {"$ref": "#"}, "minItems": 1,
        "properties": {"next": {"$ref": "#"}}, "required": ["next"],
    },
    "where it may be left out": holding(LINK, **{"$defs": {"a": LINK}}),
    "deep down": {
        "type": "object", "properties": {"x": {"type": "array", "items": LINK}},
        "$defs": {"a": holding(LINK, "next")},
    },
}  # fmt: skip
ENDING: dict[str, dict[str, Any]] = {
    "no references": holding({"type": "string"}, "next"),
    "or a text": {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    "left out": holding({"$ref": "#"}),
    "an empty list": {"type": "array", "items": {"$ref": "#"}},
    "or null": holding({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "next"),
    "a tree": {
        "type": "object", "required": ["leaves"],
        "properties": {"leaves": {"type": "array", "items": {"$ref": "#"}}},
    },
    "twice the same": {
        "type": "array", "prefixItems": [LINK, LINK], "minItems": 2, "items": False,
        "$defs": {"a": {"type": "integer"}},
    },
    "a circle nobody comes to": {"type": "null", "$defs": {"a": LINK}},
    "in a name of odd signs": {
        "$ref": "#/$defs/x~1y~0%7A", "$defs": {"x/y~z": holding({"$ref": "#"})},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_circle_that_no_text_can_end_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"\$ref '#.*circle") as refusal:
        schema_grammar(ENDLESS[name], "response_format")

    assert refusal.value.field == "response_format"


@pytest.mark.parametrize("name", ENDING)
def test_a_circle_that_a_text_can_end_is_not(name: str) -> None:
    assert schema_grammar(ENDING[name], "response_format")


def test_each_part_is_read_once_however_it_is_named() -> None:
    spellings = [f"#{'/properties/next' * depth}" for depth in range(100)]
    schema: dict[str, Any] = {"type": "null"}
    for pointer in spellings:
        schema = holding(schema, also={"anyOf": [{"$ref": pointer}, {"type": "null"}]})

    assert endless_reference(schema) == ""


@given(
    chain=st.permutations(range(30)),
    end=st.sampled_from([{"type": "string"}, {"$ref": "#"}]),
)
def test_the_order_of_definitions_does_not_matter(chain: list[int], end: dict[str, Any]) -> None:
    defs = {f"d{a}": holding({"$ref": f"#/$defs/d{b}"}, "next") for a, b in pairwise(chain)}
    defs[f"d{chain[-1]}"] = end
    schema = {"$ref": f"#/$defs/d{chain[0]}", "$defs": defs}

    assert bool(endless_reference(schema)) == ("$ref" in end)
