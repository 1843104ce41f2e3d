"""Compiled grammars: kept within bounds, and each request has its own place in them."""

from __future__ import annotations

import pytest
import torch

from rakv_cluster.model.grammar import TokenizerGrammars, TokenMask, schema_grammar
from rakv_cluster.testing.tiny_models import EOS, VOCAB_SIZE, tiny_tokenizer

EOS_ID = 2


def grammars(kept_bytes: int) -> TokenizerGrammars:
    tokenizer_json = tiny_tokenizer().backend_tokenizer.to_str()
    return TokenizerGrammars(tokenizer_json, VOCAB_SIZE, {EOS_ID}, kept_bytes=kept_bytes)


def only(text: str) -> str:
    return schema_grammar({"const": text}, "schema")


def text_of(mask: TokenMask) -> str:
    """The one text that ``mask`` allows."""
    said: list[int] = []
    while EOS_ID not in said:
        row = torch.zeros(VOCAB_SIZE)
        mask.forbid(row, ())
        (token_id,) = row.isfinite().nonzero().flatten().tolist()
        said.append(token_id)
        if token_id != EOS_ID:
            mask.accept(token_id)
    return str(tiny_tokenizer().decode(said)).removesuffix(EOS)


def test_those_used_last_stay_compiled() -> None:
    texts = [only("a"), only("b"), only("c")]
    some = grammars(kept_bytes=2 * len(texts[0]))

    for grammar in (texts[0], texts[1], texts[0], texts[2]):
        some(grammar)

    assert [some.knows(grammar) for grammar in texts] == [True, False, True]


def test_one_larger_than_all_that_is_kept_works_too() -> None:
    none = grammars(kept_bytes=0)

    assert text_of(none(only("a"))) == '"a"'
    assert not none.knows(only("a"))


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_masks_of_one_grammar_are_apart(kept_bytes: int) -> None:
    some = grammars(kept_bytes)
    first, second = some(only("grün")), some(only("grün"))

    assert text_of(first) == '"grün"'
    assert text_of(second) == '"grün"'
    assert text_of(some(only("grün"))) == '"grün"'
