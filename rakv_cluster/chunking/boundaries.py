"""Where a segment is cut into chunks.

A cut depends only on tokens of the segment up to and including the one it follows, so equal
prefixes always give equal cuts, and a generated token can only add a cut, never move one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rakv_cluster.errors import ConfigError

NO_END = 0
LINE_END = 1
PARAGRAPH_END = 2
BLANK_LINE = 3
"""White space with one newline: ends a paragraph when the token before it ended a line."""

# How a newline is spelled in vocabularies: itself, byte-level BPE, SentencePiece byte fallback.
_NEWLINE_SPELLINGS = ("\n", "\u010a", "<0x0A>")


class Vocabulary(Protocol):
    """What :meth:`CutTable.from_tokenizer` needs of a tokenizer (transformers' have it)."""

    def __len__(self) -> int: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Vocabulary spellings, not text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Sizes of chunks in tokens.

    From ``min_tokens`` on a chunk ends with a paragraph, from ``line_tokens`` (two thirds of
    ``max_tokens``) on with a line, at ``max_tokens`` in any case.
    """

    min_tokens: int = 64
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"chunk limits need 1 <= min_tokens <= max_tokens, "
                f"got {self.min_tokens} and {self.max_tokens}",
                field="min_tokens",
            )

    @property
    def line_tokens(self) -> int:
        """Length from which a line end is good enough."""
        return max(self.min_tokens, self.max_tokens * 2 // 3)


@dataclass(frozen=True, slots=True)
class CutTable:
    """For every vocabulary id, how its text ends: one of the four classes above, uint8 ``[V]``."""

    classes: np.ndarray

    @classmethod
    def from_tokenizer(cls, tokenizer: Vocabulary) -> CutTable:
        """Classify a vocabulary by the text that its tokens stand for."""
        size = len(tokenizer)
        classes = np.zeros(size, dtype=np.uint8)
        spellings = tokenizer.convert_ids_to_tokens(list(range(size)))
        for token_id, spelling in enumerate(spellings):
            # Decoding a whole vocabulary takes seconds; few entries can contain a newline.
            if spelling is not None and any(mark in spelling for mark in _NEWLINE_SPELLINGS):
                classes[token_id] = _class_of(tokenizer.decode([token_id]))
        return cls(classes)

    def classify(self, token_ids: np.ndarray) -> np.ndarray:
        """Classes of tokens, uint8 ``[n]``; ids outside the vocabulary end nothing."""
        known = token_ids < len(self.classes)
        classes = np.zeros(len(token_ids), dtype=np.uint8)
        classes[known] = self.classes[token_ids[known]]
        return classes


def _class_of(text: str) -> int:
    body = text.rstrip()
    newlines = text.count("\n", len(body))
    if newlines == 0:
        return NO_END
    if newlines > 1:
        return PARAGRAPH_END
    return LINE_END if body else BLANK_LINE


def chunk_ends(
    token_ids: np.ndarray, table: CutTable, limits: ChunkLimits, before: Sequence[int] = ()
) -> list[int]:
    """Offsets one past each complete chunk's last token, ascending.

    ``token_ids`` start at a chunk's first token; ``before`` are tokens of the same segment in
    front of them (the last one decides whether a blank first token ends a paragraph). Tokens
    behind the last offset complete no chunk yet.
    """
    total = len(token_ids)
    if total < limits.min_tokens:
        return []
    context = np.concatenate([np.asarray(before[-1:], dtype=token_ids.dtype), token_ids])
    classes = table.classify(context)
    after_line = np.zeros(len(classes), dtype=bool)
    after_line[1:] = classes[:-1] != NO_END
    paragraph = (classes == PARAGRAPH_END) | ((classes == BLANK_LINE) & after_line)
    skipped = len(context) - total
    paragraph_ends = (np.flatnonzero(paragraph[skipped:]) + 1).tolist()
    line_ends = (np.flatnonzero(classes[skipped:]) + 1).tolist()
    ends: list[int] = []
    start = 0
    while True:
        end = min(
            _first_at_least(paragraph_ends, start + limits.min_tokens, total),
            _first_at_least(line_ends, start + limits.line_tokens, total),
            start + limits.max_tokens,
        )
        if end > total:
            return ends
        ends.append(end)
        start = end


def _first_at_least(sorted_offsets: list[int], bound: int, total: int) -> int:
    """The first offset >= ``bound``, or one that lies outside the tokens."""
    index = bisect_left(sorted_offsets, bound)
    return sorted_offsets[index] if index < len(sorted_offsets) else total + 1
