"""How tokens end, read from real spellings, and how much of a text keeps its chunks."""

from __future__ import annotations

import numpy as np
import pytest

from rakv_cluster.chunking import keys
from rakv_cluster.chunking.boundaries import (
    BLANK_LINE,
    LINE_END,
    NO_END,
    PARAGRAPH_END,
    ChunkLimits,
    CutTable,
)
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.model.loader import LoadedModel

NS = keys.namespace(b"model", b"tenant")

TEXTS = {
    "word": NO_END, "\n": BLANK_LINE, "\n\n": PARAGRAPH_END, ".\n": LINE_END,
    ".\n\n": PARAGRAPH_END, "\n    ": BLANK_LINE, "\n\n\n": PARAGRAPH_END, "a\nb": NO_END,
    " \n": BLANK_LINE, "a\n\nb": NO_END, "\r\n": BLANK_LINE, "x\n\n  ": PARAGRAPH_END,
    "   ": NO_END,
}  # fmt: skip


class SpelledVocabulary:
    """A vocabulary whose entries are spelled as some tokenizer family does."""

    def __init__(self, spell) -> None:
        self._texts = list(TEXTS)
        self._spell = spell

    def __len__(self) -> int:
        return len(self._texts)

    def convert_ids_to_tokens(self, ids):
        return [self._spell(self._texts[token_id]) for token_id in ids]

    def decode(self, ids):
        return "".join(self._texts[token_id] for token_id in ids)


@pytest.mark.parametrize(
    "spell",
    [
        lambda text: text,
        lambda text: text.replace("\n", "\u010a").replace(" ", "\u0120"),
        lambda text: text.replace("\n", "<0x0A>"),
    ],
    ids=["plain", "byte-level", "byte fallback"],
)
def test_tokens_are_classified_by_their_text(spell):
    table = CutTable.from_tokenizer(SpelledVocabulary(spell))

    assert table.classes.tolist() == list(TEXTS.values())


def test_ids_outside_the_vocabulary_end_nothing():
    table = CutTable(np.array([LINE_END], dtype=np.uint8))

    assert table.classify(np.array([0, 1, 2**32 - 1], dtype=np.uint32)).tolist() == [LINE_END, 0, 0]


def paragraphs(count: int, seed: int) -> list[int]:
    """Paragraphs of 30-120 tokens; id 9 ends one."""
    draw = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(count):
        ids += draw.integers(10, 5000, int(draw.integers(30, 120))).tolist()
        ids.append(9)
    return ids


def shared(one, other) -> float:
    """Share of the first prompt's tokens whose content the other has too."""
    known = {chunk.content_key for chunk in other.chunks}
    found = sum(len(c.token_ids) for c in one.chunks if c.content_key in known)
    return found / len(one.token_ids)


def test_a_preamble_costs_one_chunk_not_all():
    classes = np.zeros(5000, dtype=np.uint8)
    classes[9] = PARAGRAPH_END
    table, limits = CutTable(classes), ChunkLimits()
    grid = CutTable(np.zeros(5000, dtype=np.uint8))
    text = paragraphs(60, seed=1)
    moved = [11] * 7 + text

    with_cuts = shared(
        chunk_prompt(NS, [text], table, limits), chunk_prompt(NS, [moved], table, limits)
    )
    on_a_grid = shared(
        chunk_prompt(NS, [text], grid, limits), chunk_prompt(NS, [moved], grid, limits)
    )

    assert with_cuts > 0.9
    assert on_a_grid == 0.0


@pytest.mark.model
def test_the_default_models_newlines_are_known(default_model: LoadedModel):
    tokenizer = default_model.tokenizer
    table = CutTable.from_tokenizer(tokenizer)
    text = "One line.\nAnother line.\n\nA paragraph.\n\n\nThe end"

    ids = tokenizer(text)["input_ids"]

    classes = table.classify(np.asarray(ids, dtype=np.uint32))
    ends = [tokenizer.decode(ids[: index + 1]) for index in np.flatnonzero(classes)]
    assert "One line.\n" in ends
    assert all(end.endswith("\n") for end in ends)
    assert (classes != NO_END).sum() >= 3
