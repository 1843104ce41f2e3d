"""The unmodified ``openai`` client against the service."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from rakv_cluster.testing.service import LocalService
from rakv_cluster.testing.waiting import first_where

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(local: LocalService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, temperature=0, user="me"
    )

    assert isinstance(answer.choices[0].message.content, str)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_with_usage(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**fields)

    chunks = list(client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_documents_and_reuse_through_extra_body(client: openai.OpenAI) -> None:
    extra = {"documents": [{"id": "a", "text": "Alpha. " * 200}], "reuse": "exact"}

    answer = first_where(
        lambda: client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, extra_body=extra
        ),
        lambda answer: answer.usage.prompt_tokens_details.cached_tokens >= 1300,
        "the documents are reused",
    )

    assert answer.model_extra["rakv"]["tokens"]["ram"] >= 1300


def test_logprobs_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2,
        extra_body={"ignore_eos": True},
    )  # fmt: skip

    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * 4


def test_completions_and_models(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="tiny", prompt="Once", max_tokens=4)

    assert completion.object == "text_completion"
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)

    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request_error")
    assert missing.value.code == "model_not_found"


async def test_the_async_client(local: LocalService) -> None:
    async with openai.AsyncOpenAI(base_url=f"{local.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, stream=True
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]

    assert reasons[-1] in {"stop", "length"}
