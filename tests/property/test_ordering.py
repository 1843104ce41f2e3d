"""The chosen order of documents against every order there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations, takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.ordering import cached_order, canonical_order
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.types import ChunkedPrompt

NAMESPACE = bytes(32)
CUTS = CutTable(np.zeros(64, dtype=np.uint8))
LIMITS = ChunkLimits(min_tokens=2, max_tokens=4)
FRONT, QUESTION = (60, 61), (62, 63)


def prompt_of(documents: Sequence[Sequence[int]]) -> ChunkedPrompt:
    return chunk_prompt(NAMESPACE, [FRONT, *documents, QUESTION], CUTS, LIMITS)


def cached_tokens(prompt: ChunkedPrompt, stored: set[bytes]) -> int:
    leading = takewhile(lambda chunk: chunk.prefix_key in stored, prompt.chunks)
    return sum(len(chunk.token_ids) for chunk in leading)


def places_of(documents: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    ends = list(accumulate((len(d) for d in documents), initial=len(FRONT)))
    return list(pairwise(ends))


DOCUMENTS = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=9).map(tuple), min_size=1, max_size=4
)


@given(documents=DOCUMENTS, data=st.data())
def test_no_order_has_more_cached(documents: list[tuple[int, ...]], data: st.DataObject) -> None:
    everything = list(permutations(range(len(documents))))
    seen = data.draw(st.lists(st.sampled_from(everything), max_size=3))
    stored = {
        chunk.prefix_key
        for order in seen
        for chunk in prompt_of([documents[i] for i in order]).chunks
    }
    lost = data.draw(st.sets(st.sampled_from(sorted(stored)), max_size=2)) if stored else set()
    stored -= lost

    prompt = prompt_of(documents)
    order = cached_order(prompt, places_of(documents), stored.intersection)

    assert sorted(order) == list(range(len(documents)))
    best = max(
        cached_tokens(prompt_of([documents[i] for i in each]), stored) for each in everything
    )
    if prompt.chunks[0].prefix_key in stored:
        assert cached_tokens(prompt_of([documents[i] for i in order]), stored) == best


@given(documents=DOCUMENTS)
def test_nothing_cached_is_canonical_order(documents: list[tuple[int, ...]]) -> None:
    order = cached_order(prompt_of(documents), places_of(documents), lambda _: ())

    assert order == tuple(range(len(documents)))


def test_the_search_is_bounded() -> None:
    documents = [(index,) for index in range(20)]
    asked = 0

    def everything(keys: Sequence[bytes]) -> Sequence[bytes]:
        nonlocal asked
        asked += 1
        return keys

    order = cached_order(prompt_of(documents), places_of(documents), everything, most_steps=50)

    assert order == tuple(range(20))
    assert asked <= 50 * 21


@given(documents=st.lists(st.text(max_size=5), max_size=5, unique=True), data=st.data())
def test_canonical_order_depends_on_the_documents_alone(
    documents: list[str], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(documents))

    first = [documents[i] for i in canonical_order([(d,) for d in documents])]
    second = [shuffled[i] for i in canonical_order([(d,) for d in shuffled])]

    assert first == second
