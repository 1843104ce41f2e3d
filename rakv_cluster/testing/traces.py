"""Requests over time for :mod:`.simulated_cluster`: recorded traces and synthetic ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from rakv_cluster.routing.score import Ints

_MOONCAKE_BLOCK = 512
_AGENT_CHUNK_CHARACTERS = 1024
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request that arrives at ``at_ms``; ``keys`` name its leading chunks, as in a router.

    One of a ``session`` holds the answers to those in front of it, so it does not arrive before
    the last of them is answered. "" is no session.
    """

    at_ms: float
    keys: tuple[bytes, ...]
    chunk_ends: Ints
    prompt_tokens: int
    output_tokens: int
    kind: str = ""
    session: str = ""


@lru_cache(maxsize=1 << 18)
def block_key(name: str) -> bytes:
    """A key as uniform as a real one."""
    return hashlib.sha256(name.encode()).digest()


def mooncake(path: Path, *, speed: float = 1.0, requests: int = 0) -> Iterator[TraceRequest]:
    """The Mooncake trace (block ids of 512-token prefixes), the first ``requests`` (0: all).

    Only full blocks are chunks.
    """
    with path.open() as lines:
        for number, line in enumerate(lines):
            if requests and number >= requests:
                return
            row = json.loads(line)
            full = row["input_length"] // _MOONCAKE_BLOCK
            blocks = row["hash_ids"][:full]
            yield TraceRequest(
                at_ms=row["timestamp"] / speed,
                keys=tuple(block_key(f"m{block}") for block in blocks),
                chunk_ends=np.arange(1, len(blocks) + 1, dtype=np.int64) * _MOONCAKE_BLOCK,
                prompt_tokens=max(row["input_length"], 1),
                output_tokens=max(row["output_length"], 1),
            )


def agent_sessions(
    folder: Path, *, copies: int = 1, begin_within_s: float = 10.0, seed: int = 0
) -> list[TraceRequest]:
    """The coding-agent sessions, each ``copies`` times under its own text, begun at random.

    A session keeps its own pace where it is answered in time. Four characters count as a token; a
    chunk is 256 tokens behind an equal prefix.
    """
    rng = np.random.default_rng(seed)
    sessions = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]
    requests = []
    for copy in range(copies):
        for number, rows in enumerate(sessions):
            begin_ms = 1e3 * begin_within_s * float(rng.random())
            first_us = min(row["timestamp"] for row in rows)
            for row in rows:
                at_ms = begin_ms + (row["timestamp"] - first_us) / 1e3
                requests.append(_agent_request(row, at_ms, copy, f"{copy}/{number}"))
    return sorted(requests, key=lambda request: request.at_ms)


def _agent_request(row: dict[str, str], at_ms: float, copy: int, session: str) -> TraceRequest:
    text = row["input"].encode()
    digest = hashlib.sha256(str(copy).encode())
    keys = []
    for start in range(0, len(text) - _AGENT_CHUNK_CHARACTERS + 1, _AGENT_CHUNK_CHARACTERS):
        digest.update(text[start : start + _AGENT_CHUNK_CHARACTERS])
        keys.append(digest.digest())
    chunk = _AGENT_CHUNK_CHARACTERS // _CHARACTERS_PER_TOKEN
    return TraceRequest(
        at_ms=at_ms,
        keys=tuple(keys),
        chunk_ends=np.arange(1, len(keys) + 1, dtype=np.int64) * chunk,
        prompt_tokens=len(text) // _CHARACTERS_PER_TOKEN + 1,
        output_tokens=len(row["output"]) // _CHARACTERS_PER_TOKEN + 1,
        session=session,
    )


@dataclass(frozen=True, slots=True)
class DocumentLoad:
    """Questions about documents of Zipf popularity, arriving at random (Poisson).

    ``kinds`` are drawn with equal chance; lengths are in tokens, ``output_tokens`` is the mean of
    a geometric distribution.
    """

    rate_per_s: float
    requests: int
    documents: int = 200
    document_tokens: int = 4096
    question_tokens: int = 64
    output_tokens: int = 100
    chunk_tokens: int = 256
    zipf: float = 1.0
    kinds: tuple[str, ...] = ("",)


def document_questions(load: DocumentLoad, seed: int) -> Iterator[TraceRequest]:
    """A synthetic trace."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, load.documents + 1) ** -load.zipf
    popularity = np.cumsum(weights / weights.sum())
    chunks = load.document_tokens // load.chunk_tokens
    ends = np.arange(1, chunks + 1, dtype=np.int64) * load.chunk_tokens
    at_ms = 0.0
    for _ in range(load.requests):
        at_ms += float(rng.exponential(1e3 / load.rate_per_s))
        document = min(int(np.searchsorted(popularity, rng.random())), load.documents - 1)
        yield TraceRequest(
            at_ms=at_ms,
            keys=tuple(block_key(f"d{document}/{chunk}") for chunk in range(chunks)),
            chunk_ends=ends,
            prompt_tokens=load.document_tokens + load.question_tokens,
            output_tokens=int(rng.geometric(1 / load.output_tokens)),
            kind=load.kinds[int(rng.integers(len(load.kinds)))],
        )
