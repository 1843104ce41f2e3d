"""Texts that follow a schema, however unlikely the model finds it: the tiny model knows no JSON."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
from llguidance import LLMatcher

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.model.grammar import schema_grammar
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.testing.service import LocalService
from rakv_cluster.types import FinishReason, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "an object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "good": {"type": "boolean"},
        },
        "required": ["name", "count", "good"],
        "additionalProperties": False,
    },
    "a list": {
        "type": "array",
        "items": {"enum": ["red", "grün", "蓝", "🟡"]},
        "minItems": 2,
        "maxItems": 4,
    },
    "one of": {
        "anyOf": [{"const": "yes"}, {"const": "no"}, {"type": "null"}],
    },
    "by reference": {
        "$defs": {"point": {"type": "object", "properties": {"x": {"enum": [1, 2, 3]}},
                            "required": ["x"], "additionalProperties": False}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "a pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
}  # fmt: skip


def body(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    given = {"messages": USER, "max_tokens": 200, "response_format": wanted, "temperature": 1.0}
    return given | fields


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT if "messages" in fields else COMPLETIONS, json=fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_follows_the_schema(http: httpx.Client, name: str, temperature: float) -> None:
    for seed in range(4):
        choice = ask(http, **body(SCHEMAS[name], seed=seed, temperature=temperature))

        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS[name])
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", SCHEMAS)
def test_neither_drafts_nor_company_nor_the_cache_change_the_text(
    http: httpx.Client, name: str
) -> None:
    fields = body(SCHEMAS[name], seed=5)
    alone = ask(http, **fields, speculation="off", reuse="off")["message"]["content"]

    with ThreadPoolExecutor(4) as pool:
        drafts = ["off", "1", "4", "8"]
        others = pool.map(lambda k: ask(http, **fields, speculation=k), drafts)
        texts = {choice["message"]["content"] for choice in others}

    assert texts == {alone}


def test_any_object(http: httpx.Client) -> None:
    choice = ask(http, messages=USER, response_format={"type": "json_object"}, max_tokens=400)

    text = choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


def test_a_completion_follows_a_schema_too(http: httpx.Client) -> None:
    fields = body(SCHEMAS["a pattern"], prompt="The code is ")
    del fields["messages"]

    answer = json.loads(ask(http, **fields)["text"])

    jsonschema.validate(answer, SCHEMAS["a pattern"])
    assert isinstance(answer, str)


def test_every_choice_follows_it(http: httpx.Client) -> None:
    response = http.post(CHAT, json=body(SCHEMAS["an object"], n=3, seed=1))

    choices = response.json()["choices"]
    assert len(choices) == 3
    for choice in choices:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS["an object"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (body({"type": "nonsense"}), "response_format.json_schema.schema"),
        (body({"$ref": "#/$defs/nowhere"}), "response_format.json_schema.schema"),
        (body({"$ref": "#"}), "response_format.json_schema.schema"),
        (body({"enum": ["x" * 70_000]}), "response_format.json_schema.schema"),
        (body({"type": "string", "pattern": "("}), "response_format.json_schema.schema"),
        (body({"type": "null"}, ignore_eos=True), "ignore_eos"),
        (body({"type": "null"}, min_tokens=3), "min_tokens"),
        ({"messages": USER, "response_format": {"type": "json_schema"}},
         "response_format.json_schema"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    response = http.post(CHAT, json=fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_free_text_is_free(http: httpx.Client) -> None:
    fields = {"messages": USER, "max_tokens": 8, "temperature": 0}

    free = ask(http, **fields, response_format={"type": "text"})
    assert free["message"]["content"] == ask(http, **fields)["message"]["content"]


def request_in(grammar: str, model: LoadedModel) -> EngineRequest:
    cuts = CutTable.from_tokenizer(model.tokenizer)
    return EngineRequest(
        request_id="whole",
        prompt=chunk_prompt(bytes(32), ((5, 6, 7),), cuts, ChunkLimits(64, 256)),
        max_tokens=100,
        sampling=SamplingParams(temperature=1.0, seed=3),
        stop_token_ids=model.card.eos_token_ids,
        grammar=grammar,
    )


@pytest.mark.parametrize("speculation", ["off", "4"])
async def test_a_text_that_a_grammar_leaves_without_a_way_on_is_no_answer(
    speculation: Any, local: LocalService, tiny_model: LoadedModel
) -> None:
    nothing = LLMatcher.grammar_from_json_schema('{"$ref": "#"}')
    request = replace(request_in(nothing, tiny_model), speculation=speculation)

    events = [event async for event in local.replica.generate(request)]

    assert [event.finish for event in events] == [FinishReason.ERROR]


async def test_a_schema_is_compiled_once_and_not_on_the_event_loop(
    local: LocalService, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watched(*given: Any) -> LLMatcher:
        threads.append(threading.get_ident())
        return LLMatcher(*given)

    asked = request_in(schema_grammar({"enum": ["never", "before"]}, "schema"), tiny_model)
    monkeypatch.setattr("rakv_cluster.model.grammar.LLMatcher", watched)

    for number in range(2):
        request = replace(asked, request_id=str(number))
        events = [event async for event in local.replica.generate(request)]
        assert events[-1].finish is FinishReason.STOP

    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_replica_that_takes_over_goes_on_in_the_grammar(
    local: LocalService, tiny_model: LoadedModel
) -> None:
    request = request_in(schema_grammar(SCHEMAS["an object"], "schema"), tiny_model)

    async def generate(asked: EngineRequest) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        async for event in local.replica.generate(asked):
            assert event.finish in {None, FinishReason.STOP}, event
            ids += event.token_ids
        return ids

    whole = await generate(request)
    for sent in (1, 9, len(whole) - 1):
        rest = await generate(replace(request, request_id=f"at {sent}", forced_ids=whole[:sent]))
        assert whole[:sent] + rest == whole
