"""From a prompt's segments to its chunks and keys: done once per request, by the ingress."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rakv_cluster.chunking import keys
from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable, chunk_ends
from rakv_cluster.types import Chunk, ChunkedPrompt


def chunk_prompt(
    ns: bytes, segments: Sequence[Sequence[int]], cuts: CutTable, limits: ChunkLimits
) -> ChunkedPrompt:
    """Cut a prompt and name its chunks.

    A segment is a document or chat message; each starts a chunk, and the end of every segment but
    the last completes one. The last segment is open: generated tokens continue it, and what stands
    behind its last cut is the prompt's tail. Raises ``InvalidRequest`` for ids that are no uint32.
    """
    token_ids = tuple(chain.from_iterable(segments))
    flat = keys.id_array(token_ids)
    ends: list[int] = []
    start = 0
    for index, segment in enumerate(segments):
        stop = start + len(segment)
        inner = chunk_ends(flat[start:stop], cuts, limits)
        ends.extend(start + end for end in inner)
        is_open = index == len(segments) - 1
        if not is_open and stop > (ends[-1] if ends else 0):
            ends.append(stop)
        if not is_open:
            start = stop
    chunks = _named(ns, token_ids, flat, ends, first_start=0, parent=keys.ROOT)
    return _prompt(ns, token_ids, chunks, segment_start=start)


def extend(
    prompt: ChunkedPrompt, new_ids: Sequence[int], cuts: CutTable, limits: ChunkLimits
) -> ChunkedPrompt:
    """The prompt with ``new_ids`` appended to its last segment, as if it had come with them."""
    token_ids = (*prompt.token_ids, *new_ids)
    start = prompt.tail_start
    flat = keys.id_array(token_ids[start:])
    before = prompt.token_ids[max(prompt.segment_start, start - 1) : start]
    ends = [start + end for end in chunk_ends(flat, cuts, limits, before)]
    parent = prompt.chunks[-1].prefix_key if prompt.chunks else keys.ROOT
    added = _named(prompt.namespace, token_ids, flat, ends, first_start=start, parent=parent)
    return _prompt(
        prompt.namespace, token_ids, (*prompt.chunks, *added), segment_start=prompt.segment_start
    )


def _named(
    ns: bytes,
    token_ids: tuple[int, ...],
    flat: np.ndarray,
    ends: list[int],
    *,
    first_start: int,
    parent: bytes,
) -> tuple[Chunk, ...]:
    """Chunks with their keys; ``flat`` holds the ids from ``first_start`` on."""
    chunks: list[Chunk] = []
    start = first_start
    for end in ends:
        ids = flat[start - first_start : end - first_start]
        parent = keys.prefix_key(ns, parent, ids)
        chunks.append(Chunk(start, token_ids[start:end], keys.content_key(ns, ids), parent))
        start = end
    return tuple(chunks)


def _prompt(
    ns: bytes, token_ids: tuple[int, ...], chunks: tuple[Chunk, ...], *, segment_start: int
) -> ChunkedPrompt:
    parent = chunks[-1].prefix_key if chunks else keys.ROOT
    return ChunkedPrompt(ns, token_ids, chunks, segment_start, keys.tail_key(ns, parent))
