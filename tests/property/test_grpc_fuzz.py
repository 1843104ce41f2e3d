"""No message makes a defect: every call of every method ends with an answer or an explicit status.

Messages are drawn from their descriptors, so that new fields are covered without being named here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.rpc.calls import Method, methods
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.grpc_server import grpc_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

METHODS = list(methods())
EXPECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_LIKELY = {
    "role": st.sampled_from(["user", "system", "assistant"]),
    "model": st.sampled_from(["", "scripted", "other"]),
    "speculation": st.sampled_from(["", "auto", "off", "4", "5"]),
    "n": st.integers(0, 17),
    "owner": st.just("me"),
    "ttl_s": st.just(60.0),
    "ids": st.integers(0, 300),
    "stop_token_ids": st.integers(0, 300),
}
_INPUT = {"prompt": "Go on"}
_WORKS = {"input": _INPUT, "request": {"input": _INPUT}, "owner": "me", "ttl_s": 60.0}
_NEEDED = {"input", "request", "owner", "ttl_s"}
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: _TEXT,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=8),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(-2, 2) | st.floats(),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 8) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


def drawn(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Up to four fields of a message, and mostly those without which nothing works."""
    fields = {field.name: _field(field, depth) for field in descriptor.fields}
    needed = {name: fields.pop(name) for name in list(fields) if name in _NEEDED}
    few = st.sets(st.sampled_from(sorted(fields)), max_size=4) if fields else st.just(set())
    return few.flatmap(
        lambda names: (
            st.fixed_dictionaries(needed | {name: fields[name] for name in names})
            | st.fixed_dictionaries(
                {}, optional={**needed, **{name: fields[name] for name in names}}
            )
        )
    )


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = (_field(message.fields_by_name[name], depth) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=3)
    one = _one(field, depth)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return drawn(field.message_type, depth + 1)
    if field.enum_type is not None:
        return st.integers(0, 5)
    scalar = _SCALARS[field.type]
    return _LIKELY[field.name] | scalar if field.name in _LIKELY else scalar


def asked(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Any message, or one that works but for up to two fields."""
    known = descriptor.fields_by_name
    works = {name: value for name, value in _WORKS.items() if name in known}
    others = sorted(set(known) - set(works))
    few = st.sets(st.sampled_from(others), max_size=2) if others else st.just(set())
    changed = few.flatmap(
        lambda names: st.fixed_dictionaries({name: _field(known[name], 0) for name in names})
    )
    return drawn(descriptor) | changed.map(lambda fields: works | fields)


def build(kind: type[Message], fields: dict[str, Any]) -> Message:
    return kind(**fields)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    shards = SimulatedShards(["n0"], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, lambda: ["n0"], ManualClock())
    with (
        grpc_server(
            lambda: scripted_service(ScriptedBackend(), Settings(), ManualClock()), admin
        ) as target,
        grpc.insecure_channel(target) as channel,
    ):
        yield channel


def call(channel: grpc.Channel, method: Method, payload: bytes) -> str:
    """How a call ends: ``OK`` or the status, checked to be one that we mean."""
    made = channel.unary_stream if method.streams else channel.unary_unary
    try:
        answered: Any = made(method.path)(payload, timeout=60)
        for raw in answered if method.streams else [answered]:
            method.response.FromString(raw)
    except grpc.RpcError as raised:
        error: Any = raised
    else:
        return "OK"
    assert error.code() in EXPECTED, (error.code(), error.details())
    assert "Traceback" not in (error.details() or "")
    return str(error.code().name)


SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_any_message(
    channel: grpc.Channel, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    ends: set[str] = set()

    @SETTINGS
    @given(fields=asked(method.request.DESCRIPTOR))
    def ask(fields: dict[str, Any]) -> None:
        payload = build(method.request, fields).SerializeToString()
        ends.add(call(channel, method, payload))

    with caplog.at_level(logging.ERROR):
        ask()

    assert not caplog.records, caplog.text
    assert "OK" in ends, "nothing that was drawn worked: it tests too little"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_any_bytes(channel: grpc.Channel, method: Method, caplog: pytest.LogCaptureFixture) -> None:
    @SETTINGS
    @given(payload=st.binary(max_size=64))
    def ask(payload: bytes) -> None:
        call(channel, method, payload)

    with caplog.at_level(logging.ERROR):
        ask()

    assert not caplog.records, caplog.text
