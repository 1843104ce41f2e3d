"""What a generation over HTTP returns. The tiny model's text is noise, but always the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx

from rakv_cluster.testing.chats import CHAT, LASTING, ask, cached_tokens, chat, reusing
from rakv_cluster.testing.scrapes import cancelled, running, scrape
from rakv_cluster.testing.service import LocalService, StartLocal
from rakv_cluster.testing.tiny_models import SPECIAL_TOKENS
from rakv_cluster.testing.waiting import eventually

COMPLETIONS = "/v1/completions"
DOCUMENTS = [{"id": "a", "text": "Alpha. " * 100}, {"id": "b", "text": "Beta. " * 100}]


def token_id(character: str) -> str:
    """The tiny tokenizer's id of a printable ASCII character, as a key of ``logit_bias``."""
    return str(len(SPECIAL_TOKENS) + ord(character) - ord("!"))


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def stream(http: httpx.Client, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """Decoded events of a stream that ended with ``[DONE]``."""
    with http.stream("POST", path, json=chat(**fields) | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed_text(events: Sequence[dict[str, Any]], choice: int = 0) -> str:
    deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == choice]
    return "".join(delta.get("content", "") for delta in deltas)


def test_an_answer_has_openais_shape_and_our_account(http: httpx.Client) -> None:
    answer = ask(http, reuse="off")

    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert answer["rakv"]["tokens"] == {
        "ram": 0, "disk": 0, "blended": 0, "computed": usage["prompt_tokens"],
    }  # fmt: skip
    assert set(answer["rakv"]["timings_ms"]) == {
        "tokenize", "queue", "load", "prefill", "decode", "ttft", "total",
    }  # fmt: skip


def test_documents_asked_about_twice_are_reused_and_change_no_text(http: httpx.Client) -> None:
    cold = ask(http, documents=DOCUMENTS, reuse="off")
    first = ask(http, documents=DOCUMENTS)
    again = reusing(lambda: ask(http, documents=DOCUMENTS))
    question = [{"role": "user", "content": "Another question?"}]
    other = ask(http, documents=DOCUMENTS, messages=question)
    other_cold = ask(http, documents=DOCUMENTS, messages=question, reuse="off")

    prompt_tokens = again["usage"]["prompt_tokens"]
    assert text_of(cold) == text_of(first) == text_of(again)
    assert text_of(other) == text_of(other_cold)
    assert cached_tokens(again) >= 1300
    assert again["rakv"]["tokens"]["ram"] + again["rakv"]["tokens"]["computed"] == prompt_tokens
    assert cached_tokens(other) >= 1300


def test_a_stream_says_the_same_as_a_whole_answer(http: httpx.Client) -> None:
    whole = ask(http)

    events = stream(http, stream_options={"include_usage": True})

    assert streamed_text(events) == text_of(whole)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    reasons = [c["finish_reason"] for e in events for c in e["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 24
    assert events[-1]["rakv"]["reuse"] == "exact"
    assert events[-1]["rakv"]["exactness"] in {"bitwise", "guarded"}
    assert all("usage" not in event for event in events[:-1])


def test_without_being_asked_a_stream_has_no_usage(http: httpx.Client) -> None:
    assert all(event["choices"] for event in stream(http))


def test_a_stop_string_ends_the_text_before_it_and_is_never_streamed(http: httpx.Client) -> None:
    whole = text_of(ask(http))
    stop = whole[8:11]
    expected = whole[: whole.find(stop)]

    answer = ask(http, stop=["never", stop])
    events = stream(http, stop=stop, stream_options={"include_usage": True})

    assert text_of(answer) == streamed_text(events) == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 24
    assert events[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_what_a_stop_string_ends_is_accounted_for_up_to_there(http: httpx.Client) -> None:
    stop = text_of(ask(http))[8:11]

    answer = ask(http, stop=stop)

    account = answer["rakv"]
    assert account["timings_ms"]["decode"] > 0
    steps = sum(account["speculation"]["steps_by_drafts"].values())
    taken = steps + account["speculation"]["accepted_tokens"] + 1
    assert answer["usage"]["completion_tokens"] <= taken <= 24


def test_a_stopped_stream_shows_log_probabilities_of_its_text_only(http: httpx.Client) -> None:
    whole = text_of(ask(http))
    stop = whole[8:11]

    events = stream(http, stop=stop, logprobs=True)

    shown = [e for event in events for e in event["choices"][0]["logprobs"]["content"]]
    raw = bytes(b for entry in shown for b in entry["bytes"])
    assert raw.decode("utf-8", errors="replace") == streamed_text(events)


def test_log_probabilities_come_with_alternatives(http: httpx.Client) -> None:
    answer = ask(http, logprobs=True, top_logprobs=3)

    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 24
    raw = bytes(b for entry in entries for b in entry["bytes"])
    assert raw.decode("utf-8", errors="replace") == text_of(answer)
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"]) <= 0


def test_a_seed_repeats_and_choices_differ(http: httpx.Client) -> None:
    sampled = {"temperature": 1.0, "seed": 7}

    one = ask(http, **sampled)
    three = ask(http, n=3, **sampled)
    again = ask(http, n=3, **sampled)

    texts = [text_of(three, index) for index in range(3)]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert texts == [text_of(again, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert texts[0] == text_of(one)
    assert three["usage"]["completion_tokens"] == 72


def test_choices_are_streamed_side_by_side(http: httpx.Client) -> None:
    whole = ask(http, n=2, temperature=1.0, seed=3)

    events = stream(http, n=2, temperature=1.0, seed=3)

    assert [streamed_text(events, i) for i in (0, 1)] == [text_of(whole, i) for i in (0, 1)]
    roles = [c["index"] for e in events for c in e["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1]


def test_requests_without_a_seed_draw_one(http: httpx.Client) -> None:
    assert text_of(ask(http, temperature=1.0)) != text_of(ask(http, temperature=1.0))


def test_penalties_bias_and_cuts_reach_the_engine(http: httpx.Client) -> None:
    plain = text_of(ask(http))

    assert text_of(ask(http, logit_bias={token_id("A"): 100})) == "A" * 24
    assert text_of(ask(http, repetition_penalty=5.0)) != plain
    assert text_of(ask(http, presence_penalty=2.0, frequency_penalty=2.0)) != plain
    assert text_of(ask(http, temperature=2.0, top_k=1, seed=1)) == plain


def test_a_stop_token_ends_and_min_tokens_hold_it_off(http: httpx.Client) -> None:
    always, ends = {token_id("A"): 100}, [int(token_id("A"))]

    assert text_of(ask(http, logit_bias=always, stop_token_ids=ends)) == ""
    held = ask(http, logit_bias=always, stop_token_ids=ends, min_tokens=5)
    assert held["usage"]["completion_tokens"] >= 5
    assert held["choices"][0]["finish_reason"] == "stop"


def test_a_completion_has_its_own_shape(http: httpx.Client) -> None:
    fields = {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}

    plain = http.post(COMPLETIONS, json=fields | {"logprobs": 2}).json()
    echoed = http.post(COMPLETIONS, json=fields | {"echo": True}).json()

    assert plain["object"] == "text_completion"
    assert plain["id"].startswith("cmpl-")
    assert echoed["choices"][0]["text"] == "Once" + plain["choices"][0]["text"]
    logprobs = plain["choices"][0]["logprobs"]
    assert [len(logprobs[key]) for key in ("tokens", "token_logprobs", "text_offset")] == [5, 5, 5]
    assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"])


def test_a_completion_streams(http: httpx.Client) -> None:
    fields = {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = http.post(COMPLETIONS, json=fields).json()

    with http.stream("POST", COMPLETIONS, json=fields | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]

    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == whole["choices"][0]["text"]


def test_documents_reach_a_completion(http: httpx.Client) -> None:
    fields = {"prompt": "Once", "max_tokens": 5, "documents": DOCUMENTS}

    again = reusing(lambda: http.post(COMPLETIONS, json=fields).json())

    assert cached_tokens(again) >= 1300


def test_content_parts_are_one_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]

    answer = ask(http, messages=[{"role": "user", "content": parts}])

    assert text_of(answer) == text_of(ask(http, messages=[{"role": "user", "content": "Hel\nlo"}]))


def test_models_and_probes(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()

    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready", "model": "tiny"}
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]


def test_metrics_count_what_happened(start_local: StartLocal) -> None:
    service = start_local()
    with httpx.Client(base_url=service.url, timeout=60.0) as http:
        used = ask(http)["usage"]
        http.post(CHAT, json={})
        metrics = scrape(lambda: http.get("/metrics").text)

    assert 'rakv_requests_total{endpoint="chat",status="ok"} 1.0' in metrics
    counted = f'{{reuse="exact",source="computed"}} {used["prompt_tokens"]}.0'
    assert f"rakv_prompt_tokens_total{counted}" in metrics
    assert "rakv_output_tokens_total 24.0" in metrics
    assert "rakv_requests_in_flight 0.0" in metrics
    assert 'rakv_time_to_first_token_seconds_count{cache="cold"} 1.0' in metrics
    assert 'rakv_engine_requests_total{replica="local"} 1.0' in metrics


def test_a_client_that_goes_away_frees_the_engine(local: LocalService, http: httpx.Client) -> None:
    def metrics() -> str:
        return http.get("/metrics").text

    eventually(lambda: running(metrics) == 0, "nothing else runs")
    before = cancelled(metrics)
    with (
        httpx.Client(base_url=local.url, timeout=60.0) as client,
        client.stream("POST", CHAT, json=chat(**LASTING, stream=True)) as response,
    ):
        lines = response.iter_lines()
        next(lines)

    eventually(lambda: cancelled(metrics) > before, "the engine has ended the request")
    eventually(lambda: running(metrics) == 0, "it has nothing left to run")


def test_a_full_queue_is_429_and_says_when_to_come_back(start_local: StartLocal) -> None:
    service = start_local(max_running=1, max_waiting=1)
    with (
        httpx.Client(base_url=service.url, timeout=60.0) as http,
        ThreadPoolExecutor(2) as pool,
        http.stream("POST", CHAT, json=chat(**LASTING, stream=True)) as first,
    ):
        lines = first.iter_lines()  # its end would end the stream
        next(lines)

        others = [pool.submit(http.post, CHAT, json=chat()) for _ in range(2)]
        refused = next(as_completed(others)).result()
        first.close()
        statuses = sorted(other.result().status_code for other in others)

    assert statuses == [200, 429]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_deadline_is_408_or_ends_the_stream_with_an_error(start_local: StartLocal) -> None:
    service = start_local(request_timeout_s=0.3)
    with httpx.Client(base_url=service.url, timeout=60.0) as http:
        whole = http.post(CHAT, json=chat(**LASTING))
        with http.stream("POST", CHAT, json=chat(**LASTING, stream=True)) as response:
            lines = [line for line in response.iter_lines() if line]

    assert whole.status_code == 408
    assert whole.json()["error"]["code"] == "deadline_exceeded"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
