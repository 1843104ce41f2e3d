"""What is generated. The tiny model's text is noise, but always the same."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from typing import Any

import httpx
import pytest

from rakv_cluster.testing.chats import LASTING, chat
from rakv_cluster.testing.surfaces import Piece, Surface, Usage
from rakv_cluster.testing.tiny_models import SPECIAL_TOKENS
from rakv_cluster.testing.waiting import first_where

from .conftest import MAX_RUNNING, Cluster

pytestmark = pytest.mark.cluster

USER = [{"role": "user", "content": "Hello"}]
DOCUMENTS = [{"id": "a", "text": "Alpha. " * 60}, {"id": "b", "text": "Beta. " * 60}]
EOS = "2"


def completion(prompt: object, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields


def token_id(character: str) -> str:
    """The tiny tokenizer's id of a printable ASCII character."""
    return str(len(SPECIAL_TOKENS) + ord(character) - ord("!"))


def collect(surface: Surface, **fields: Any) -> tuple[list[Piece], list[Usage]]:
    with surface.stream(**fields) as events:
        got = list(events)
    return [e for e in got if isinstance(e, Piece)], [e for e in got if isinstance(e, Usage)]


def joined(pieces: list[Piece], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)


# --- which tokens


def test_greedy_is_repeatable(surface: Surface) -> None:
    assert surface.ask(**chat()).text == surface.ask(**chat()).text != ""


def test_both_surfaces_say_the_same(cluster: Cluster) -> None:
    fields = chat(documents=DOCUMENTS, temperature=0.8, seed=5, n=2, top_logprobs=2)
    with closing(cluster.surface("http")) as http, closing(cluster.surface("grpc")) as grpc:
        over_http, over_grpc = http.ask(**fields), grpc.ask(**fields)

    assert over_http.texts == over_grpc.texts
    assert over_http.finish_reasons == over_grpc.finish_reasons
    assert over_http.logprobs == over_grpc.logprobs
    assert over_http.usage.prompt_tokens == over_grpc.usage.prompt_tokens


def test_a_seed_repeats_and_another_differs(surface: Surface) -> None:
    texts = [surface.ask(**chat(temperature=1.0, seed=s)).text for s in (7, 7, 8)]

    assert texts[0] == texts[1] != texts[2]


def test_a_negative_seed_is_one_too(surface: Surface) -> None:
    texts = [surface.ask(**chat(temperature=1.0, seed=-3)).text for _ in range(2)]

    assert texts[0] == texts[1]


def test_without_a_seed_one_is_drawn(surface: Surface) -> None:
    assert surface.ask(**chat(temperature=1.0)).text != surface.ask(**chat(temperature=1.0)).text


def test_choices_differ_and_the_first_is_that_of_one(surface: Surface) -> None:
    one = surface.ask(**chat(temperature=1.0, seed=7))
    three = surface.ask(**chat(temperature=1.0, seed=7, n=3))

    assert len(set(three.texts)) == 3
    assert three.text == one.text
    assert three.usage.output_tokens == 72


def test_top_k_of_one_is_greedy(surface: Surface) -> None:
    assert surface.ask(**chat(temperature=2.0, top_k=1)).text == surface.ask(**chat()).text


def test_a_tiny_top_p_is_greedy(surface: Surface) -> None:
    assert surface.ask(**chat(temperature=1.0, top_p=1e-6)).text == surface.ask(**chat()).text


def test_a_min_p_of_one_is_greedy(surface: Surface) -> None:
    assert surface.ask(**chat(temperature=1.0, min_p=1.0)).text == surface.ask(**chat()).text


def test_a_bias_decides(surface: Surface) -> None:
    assert surface.ask(**chat(logit_bias={token_id("A"): 100})).text == "A" * 24


def test_a_presence_penalty_changes_the_text(surface: Surface) -> None:
    fields = {"logit_bias": {token_id("A"): 50, token_id("B"): 50, token_id("C"): 50}}

    texts = [surface.ask(**chat(**fields, presence_penalty=p)).text for p in (0.0, 2.0, -2.0)]

    assert len(set(texts)) > 1
    assert all(set(text) <= set("ABC") for text in texts)


def test_a_frequency_penalty_grows_until_another_token_comes(surface: Surface) -> None:
    fields = {"logit_bias": {token_id("A"): 100, token_id("B"): 60}, "max_tokens": 60}

    assert surface.ask(**chat(**fields)).text == "A" * 60
    assert "AB" in surface.ask(**chat(**fields, frequency_penalty=2.0)).text


def test_a_repetition_penalty_changes_the_text(surface: Surface) -> None:
    assert surface.ask(**chat(repetition_penalty=5.0)).text != surface.ask(**chat()).text


@pytest.mark.parametrize("drafts", ["off", "4"])
def test_speculation_changes_no_text(surface: Surface, drafts: str) -> None:
    fields = chat(messages=[{"role": "user", "content": "abc abc abc"}])

    assert surface.ask(**fields, speculation=drafts).text == surface.ask(**fields).text


# --- where it ends


def test_max_tokens_is_exact(surface: Surface) -> None:
    for count in (1, 5):
        reply = surface.ask(**chat(max_tokens=count))
        assert (reply.usage.output_tokens, reply.finish_reasons) == (count, ("length",))


def test_a_stop_string_ends_the_text_before_it(surface: Surface) -> None:
    whole = surface.ask(**chat()).text
    stop = whole[8:11]

    reply = surface.ask(**chat(stop=stop))

    assert reply.text == whole[: whole.find(stop)]
    assert reply.finish_reasons == ("stop",)
    assert reply.usage.output_tokens < 24


def test_of_several_stop_strings_the_first_in_the_text_counts(surface: Surface) -> None:
    whole = surface.ask(**chat()).text
    stops = [whole[12:15], "never said", whole[5:8]]

    expected = min(whole.find(stop) for stop in stops if stop in whole)
    assert surface.ask(**chat(stop=stops)).text == whole[:expected]


def test_the_models_end_ends_unless_it_is_ignored(surface: Surface) -> None:
    ended = surface.ask(**chat(logit_bias={EOS: 100}, ignore_eos=False))

    assert (ended.text, ended.finish_reasons) == ("", ("stop",))
    assert surface.ask(**chat(logit_bias={EOS: 100})).finish_reasons == ("length",)


def test_a_stop_token_ends_and_min_tokens_hold_it_off(surface: Surface) -> None:
    fields = {"logit_bias": {token_id("A"): 100}, "stop_token_ids": [int(token_id("A"))]}

    assert surface.ask(**chat(**fields)).text == ""
    held = surface.ask(**chat(**fields, min_tokens=5))
    assert held.usage.output_tokens >= 5
    assert held.finish_reasons == ("stop",)


def test_a_schema_is_followed(surface: Surface) -> None:
    schema = json.dumps(
        {"type": "array", "items": {"enum": ["é", 7]}, "minItems": 2, "maxItems": 3}
    )
    fields = {"json_schema": schema, "ignore_eos": False, "max_tokens": 100, "temperature": 1.0}

    replies = [surface.ask(**chat(**fields, seed=seed)) for seed in (1, 1, 2)]

    assert replies[0].text == replies[1].text
    for reply in replies:
        assert set(json.loads(reply.text)) <= {"é", 7}
        assert reply.finish_reasons == ("stop",)


# --- log-probabilities


@pytest.mark.parametrize("fields", [chat(), completion("Once")], ids=["chat", "prompt"])
def test_log_probabilities_come_with_alternatives(surface: Surface, fields: dict[str, Any]) -> None:
    reply = surface.ask(**fields, top_logprobs=3)

    (entries,) = reply.logprobs
    assert len(entries) == 24
    for entry in entries:
        assert len(entry.top) == 3
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0


def test_tokens_of_log_probabilities_join_to_the_text(surface: Surface) -> None:
    reply = surface.ask(**chat(top_logprobs=0))

    raw = b"".join(entry.token for entry in reply.logprobs[0])
    assert raw.decode("utf-8", errors="replace") == reply.text
    assert not any(entry.top for entry in reply.logprobs[0])


def test_without_asking_there_are_none(surface: Surface) -> None:
    assert surface.ask(**chat()).logprobs == ((),)


# --- the prompt


def test_ids_are_a_prompt(surface: Surface, cluster: Cluster) -> None:
    headers = {"Authorization": f"Bearer {cluster.keys['alpha']}"}
    asked = {"prompt": "Once upon"}
    answer = httpx.post(f"{cluster.url}/tokenize", json=asked, headers=headers, timeout=60).json()

    by_ids = surface.ask(**completion(answer["tokens"]))

    assert by_ids.text == surface.ask(**completion("Once upon")).text
    assert by_ids.usage.prompt_tokens == answer["count"]


def test_a_system_message_counts(surface: Surface) -> None:
    system = [{"role": "system", "content": "Be short."}, *USER]

    assert surface.ask(**chat(messages=system)).text != surface.ask(**chat()).text


def test_developer_is_another_name_for_system(surface: Surface) -> None:
    texts = [
        surface.ask(**chat(messages=[{"role": role, "content": "Be short."}, *USER])).text
        for role in ("system", "developer")
    ]

    assert texts[0] == texts[1]


def test_history_counts(surface: Surface) -> None:
    history = [*USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "?"}]

    longer = surface.ask(**chat(messages=history)).usage.prompt_tokens
    assert longer > surface.ask(**chat()).usage.prompt_tokens


def test_a_prompt_in_any_script(surface: Surface) -> None:
    reply = surface.ask(**completion("Grüße, 世界 🌍"))

    assert reply.usage.prompt_tokens >= len("Grüße, 世界 🌍".encode())


def test_the_model_may_be_named(surface: Surface) -> None:
    assert surface.ask(**chat(model="tiny")).text == surface.ask(**chat()).text


# --- documents and reuse


def test_documents_are_reused_under_another_question(surface: Surface) -> None:
    documents = [{"id": surface.name, "text": f"Over {surface.name}.\n\n" * 60}]
    first = surface.ask(**chat(documents=documents, max_tokens=1))
    first_where(
        lambda: surface.ask(**chat(documents=documents, max_tokens=1)).usage,
        lambda usage: usage.cached_tokens > 0.8 * usage.prompt_tokens,
        "the documents are stored",
    )
    other = [{"role": "user", "content": "Another question?"}]
    again = surface.ask(**chat(documents=documents, messages=other, max_tokens=1))

    assert first.usage.cached_tokens < 100
    assert again.usage.cached_tokens > 0.8 * again.usage.prompt_tokens


def test_reuse_changes_no_text(surface: Surface) -> None:
    fields = chat(documents=DOCUMENTS)

    reused = first_where(
        lambda: surface.ask(**fields), lambda reply: reply.usage.cached_tokens > 0, "it is reused"
    )
    computed = surface.ask(**fields, reuse="off")

    assert computed.usage.cached_tokens == 0
    assert reused.text == computed.text


def test_the_accounts_add_up(surface: Surface) -> None:
    usage = surface.ask(**chat(documents=DOCUMENTS, reuse="exact")).usage

    assert sum(usage.sources.values()) == usage.prompt_tokens
    assert usage.prompt_tokens - usage.sources["computed"] == usage.cached_tokens
    assert usage.output_tokens == 24


# --- streams


def test_a_stream_says_the_same_as_a_whole_answer(surface: Surface) -> None:
    # Long: what a reader is late for comes as one piece.
    fields = chat(max_tokens=120, speculation="off")
    pieces, usages = collect(surface, **fields)

    assert joined(pieces) == surface.ask(**fields).text
    assert len(pieces) > 5
    assert [usage.output_tokens for usage in usages] == [120]


def test_a_stream_ends_each_choice_once_and_then_tells_the_usage(surface: Surface) -> None:
    with surface.stream(**chat(n=2, temperature=1.0, seed=1)) as events:
        got = list(events)

    assert isinstance(got[-1], Usage)
    ends = Counter(e.index for e in got[:-1] if isinstance(e, Piece) and e.finish_reason)
    assert ends == {0: 1, 1: 1}
    for index in (0, 1):
        assert [e for e in got[:-1] if isinstance(e, Piece) and e.index == index][-1].finish_reason


def test_choices_are_streamed_side_by_side(surface: Surface) -> None:
    fields = chat(n=2, temperature=1.0, seed=3)
    pieces, _ = collect(surface, **fields)

    assert (joined(pieces, 0), joined(pieces, 1)) == surface.ask(**fields).texts


def test_a_stop_string_is_never_streamed(surface: Surface) -> None:
    whole = surface.ask(**chat()).text
    stop = whole[8:11]

    pieces, _ = collect(surface, **chat(stop=[stop]))

    assert joined(pieces) == whole[: whole.find(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_pieces_are_whole_characters(surface: Surface) -> None:
    # Bytes of several-byte characters are likely here; half of one must not be shown.
    fields = completion("é世🌍" * 20, temperature=1.5, seed=11, max_tokens=200)

    pieces, _ = collect(surface, **fields)

    assert joined(pieces) == surface.ask(**fields).text
    assert joined(pieces).encode().decode() == joined(pieces)


def test_the_first_piece_comes_long_before_the_last(surface: Surface, cluster: Cluster) -> None:
    with surface.stream(**chat(**LASTING, n=MAX_RUNNING)) as events:
        assert isinstance(next(events), Piece)
        assert cluster.running() >= 1.0
