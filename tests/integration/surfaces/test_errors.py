"""What is refused, by which class and naming which field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rakv_cluster.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RakvError,
    Unauthenticated,
)
from rakv_cluster.testing.surfaces import Surface

from .conftest import Cluster
from .test_generation import USER, chat, completion

pytestmark = pytest.mark.cluster

BAD = {
    "temperature below 0": (chat(temperature=-1), "temperature"),
    "temperature above 2": (chat(temperature=2.5), "temperature"),
    "top_p 0": (chat(top_p=0), "top_p"),
    "top_k -2": (chat(top_k=-2), "top_k"),
    "min_p above 1": (chat(min_p=1.5), "min_p"),
    "presence_penalty 3": (chat(presence_penalty=3), "presence_penalty"),
    "frequency_penalty -3": (chat(frequency_penalty=-3), "frequency_penalty"),
    "repetition_penalty 0": (chat(repetition_penalty=0), "repetition_penalty"),
    "max_tokens 0": (chat(max_tokens=0), "max_tokens"),
    "min above max": (chat(min_tokens=25), "min_tokens"),
    "n 0": (chat(n=0), "n"),
    "n 17": (chat(n=17), "n"),
    "an empty stop string": (chat(stop=["a", ""]), "stop.1"),
    "17 stop strings": (chat(stop=["a"] * 17), "stop"),
    "bias of an unknown token": (chat(logit_bias={"259": 1}), "logit_bias"),
    "bias too strong": (chat(logit_bias={"5": 101}), "logit_bias.5"),
    "stop token unknown": (chat(stop_token_ids=[259]), "stop_token_ids"),
    "21 alternatives": (chat(top_logprobs=21), "top_logprobs"),
    "drafts of a number there is not": (chat(speculation="3"), "speculation"),
    "a role nobody has": (chat(messages=[{"role": "boss", "content": "x"}]), "messages.0.role"),
    "no messages": (chat(messages=[]), "messages"),
    "only blank messages": (chat(messages=[{"role": "user", "content": " "}]), "messages"),
    "an empty document": (chat(documents=[{"text": ""}]), "documents.0.text"),
    "documents and no user": (
        chat(messages=[{"role": "system", "content": "s"}], documents=[{"text": "a"}]),
        "documents",
    ),
    "an empty prompt": (completion(""), "prompt"),
    "an id of no token": (completion([259]), "prompt"),
    "ids and documents": (completion([5], documents=[{"text": "a"}]), "documents"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_its_field(surface: Surface, name: str) -> None:
    fields, field = BAD[name]

    with pytest.raises(InvalidRequest) as caught:
        surface.ask(**fields)

    assert type(caught.value) is InvalidRequest
    assert caught.value.field == field
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (chat(messages=[{"role": "user", "content": "x" * 5000}]), "messages"),
        (completion("x" * 5000), "prompt"),
        (chat(max_tokens=2040), "max_tokens"),
    ],
    ids=["chat", "prompt", "answer"],
)
def test_what_does_not_fit_the_context(
    surface: Surface, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ContextLengthExceeded, match="2048") as caught:
        surface.ask(**fields)
    assert caught.value.field == field


def test_bad_input_is_refused_before_a_stream_begins(surface: Surface) -> None:
    with (
        pytest.raises(InvalidRequest) as caught,
        surface.stream(**chat(temperature=9)) as events,
    ):
        next(events)
    assert caught.value.field == "temperature"


def test_a_model_that_is_not_here(surface: Surface) -> None:
    with pytest.raises(ModelNotFound, match="tiny") as caught:
        surface.ask(**chat(model="gpt-4"))
    assert caught.value.field == "model"


def test_a_message_that_is_too_large(surface: Surface) -> None:
    # HTTP says 413, which gRPC has no status for; its library refuses before we see the message.
    with pytest.raises((InvalidRequest, Overloaded)):
        surface.ask(**chat(documents=[{"text": "x" * 2_000_000}]))
    assert surface.ask(**chat()).text


@pytest.mark.parametrize("tenant", ["nobody", "stranger"])
def test_a_key_is_needed_and_must_be_known(surface: Surface, cluster: Cluster, tenant: str) -> None:
    keys = {"stranger": cluster.keys["alpha"] + "x"}
    view = replace(cluster, keys=keys).surface(surface.name, tenant)
    with pytest.raises(Unauthenticated):
        view.ask(**chat())
    with pytest.raises(Unauthenticated), view.stream(**chat()) as events:
        next(events)
    view.close()


OPERATIONS: dict[str, Callable[[Surface], object]] = {
    "pin": lambda view: view.cache("pin", messages=USER, owner="me", ttl_s=5.0),
    "unpin": lambda view: view.cache("unpin", messages=USER, owner="me"),
    "evict": lambda view: view.cache("evict", messages=USER),
    "stats": lambda view: view.stats(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operating_the_cache_needs_the_admin_scope(surface: Surface, operation: str) -> None:
    with pytest.raises(PermissionDenied):
        OPERATIONS[operation](surface)


@pytest.mark.parametrize(("owner", "ttl_s"), [("", 1.0), ("x" * 65, 1.0), ("me", 0.0), ("me", 1e9)])
def test_a_pin_needs_an_owner_and_an_end(root: Surface, owner: str, ttl_s: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        root.cache("pin", messages=USER, owner=owner, ttl_s=ttl_s)
    assert caught.value.field in {"owner", "ttl_s"}


def test_operations_check_their_prompts_too(surface: Surface) -> None:
    with pytest.raises(RakvError) as caught:
        surface.cache("lookup", messages=[{"role": "boss", "content": "x"}])
    assert caught.value.field == "messages.0.role"
