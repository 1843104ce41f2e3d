"""Cuts and keys: equal prefixes give equal chunks, and nothing looks ahead."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.chunking import keys
from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable, chunk_ends
from rakv_cluster.chunking.prompt import chunk_prompt, extend
from rakv_cluster.errors import ConfigError, InvalidRequest

VOCABULARY = 12
TABLE = CutTable(np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 3], dtype=np.uint8))
NS = keys.namespace(b"model", b"tenant")

token_ids = st.lists(st.integers(0, VOCABULARY + 3), max_size=60)
segments = st.lists(token_ids, min_size=1, max_size=5)
limits = st.tuples(st.integers(1, 6), st.integers(0, 9)).map(
    lambda pair: ChunkLimits(pair[0], pair[0] + pair[1])
)


@given(segments, limits)
def test_chunks_cover_the_prompt_up_to_its_tail_within_the_limits(parts, bounds):
    prompt = chunk_prompt(NS, parts, TABLE, bounds)

    flat = tuple(token for part in parts for token in part)
    assert prompt.token_ids == flat
    assert sum((chunk.token_ids for chunk in prompt.chunks), ()) == flat[: prompt.tail_start]
    position = 0
    for chunk in prompt.chunks:
        assert chunk.start == position
        assert 1 <= len(chunk.token_ids) <= bounds.max_tokens
        position = chunk.end
    assert len(flat) - prompt.tail_start < bounds.max_tokens
    assert prompt.segment_start == len(flat) - len(parts[-1])


@given(segments, limits)
def test_every_document_starts_a_chunk(parts, bounds):
    prompt = chunk_prompt(NS, parts, TABLE, bounds)

    starts = {chunk.start for chunk in prompt.chunks} | {prompt.tail_start}
    position = 0
    for part in parts:
        if part:
            assert position in starts
        position += len(part)


@given(segments, token_ids, limits)
def test_a_prefix_of_the_last_segment_keeps_its_cuts(parts, more, bounds):
    short = chunk_prompt(NS, parts, TABLE, bounds)

    longer = chunk_prompt(NS, [*parts[:-1], [*parts[-1], *more]], TABLE, bounds)

    assert longer.chunks[: len(short.chunks)] == short.chunks


@given(segments, st.lists(token_ids, max_size=4), limits)
def test_extending_equals_chunking_at_once(parts, additions, bounds):
    grown = chunk_prompt(NS, parts, TABLE, bounds)
    for addition in additions:
        grown = extend(grown, addition, TABLE, bounds)

    at_once = [*parts[:-1], [*parts[-1], *(token for part in additions for token in part)]]
    assert grown == chunk_prompt(NS, at_once, TABLE, bounds)


@given(segments, segments, limits)
def test_documents_are_cut_alike_wherever_they_stand(parts, before, bounds):
    closed = [*parts, []]
    alone = chunk_prompt(NS, closed, TABLE, bounds)

    behind = chunk_prompt(NS, [*before, *closed], TABLE, bounds)

    assert [c.content_key for c in behind.chunks[-len(alone.chunks) or len(behind.chunks) :]] == [
        c.content_key for c in alone.chunks
    ]


@given(segments, segments, limits)
def test_prefix_keys_are_equal_exactly_for_equal_prefixes(one, other, bounds):
    chunks = [
        (chunk, prompt.token_ids[: chunk.end])
        for prompt in (chunk_prompt(NS, part, TABLE, bounds) for part in (one, other))
        for chunk in prompt.chunks
    ]

    for left, left_prefix in chunks:
        for right, right_prefix in chunks:
            if left.prefix_key == right.prefix_key:
                assert left_prefix == right_prefix
            assert (left.content_key == right.content_key) == (left.token_ids == right.token_ids)


def test_cuts_prefer_paragraphs_then_lines_then_the_limit():
    bounds = ChunkLimits(min_tokens=4, max_tokens=12)
    plain, line, paragraph, blank = 0, 7, 9, 10

    def ends(ids):
        return chunk_ends(np.array(ids, dtype=np.uint32), TABLE, bounds)

    assert ends([plain] * 30) == [12, 24]
    assert ends([plain] * 5 + [paragraph] + [plain] * 12) == [6, 18]
    assert ends([plain, paragraph] + [plain] * 3 + [paragraph]) == [6]
    assert ends([plain] * 6 + [line] + [plain] * 2 + [line] + [plain] * 3) == [10]
    assert ends([plain] * 5 + [line, blank] + [plain] * 3) == [7]
    assert ends([plain] * 6 + [blank] + [plain] * 3) == []


def test_kinds_of_key_never_coincide():
    names = {
        keys.content_key(NS, []),
        keys.prefix_key(NS, keys.ROOT, []),
        keys.tail_key(NS, keys.ROOT),
        keys.content_key(NS, [0] * 8),
        keys.prefix_key(NS, keys.ROOT, [0] * 8),
    }

    assert len(names) == 5


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_namespaces_differ_by_model_and_by_salt(digest, salt, other_digest, other_salt):
    same = (digest, salt) == (other_digest, other_salt)

    assert (keys.namespace(digest, salt) == keys.namespace(other_digest, other_salt)) == same


def test_keys_do_not_depend_on_the_process():
    code = (
        "from rakv_cluster.chunking import keys\n"
        "ns = keys.namespace(b'model', b'tenant')\n"
        "parent = keys.prefix_key(ns, keys.ROOT, [1, 2, 3])\n"
        "print(keys.content_key(ns, [7]).hex(), parent.hex(), keys.tail_key(ns, parent).hex())"
    )

    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "31337")
    }  # fmt: skip

    expected = keys.prefix_key(NS, keys.ROOT, [1, 2, 3])
    assert len(outputs) == 1
    assert expected.hex() in outputs.pop()


@pytest.mark.parametrize("bad", [[-1], [2**32], [2**70], ["x"]])
def test_ids_that_are_no_uint32_are_refused(bad):
    with pytest.raises(InvalidRequest) as caught:
        keys.content_key(NS, bad)

    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-1, 8)])
def test_limits_that_cannot_hold_are_refused(low, high):
    with pytest.raises(ConfigError):
        ChunkLimits(low, high)
