"""Incremental text: what a stream shows, and when."""

from __future__ import annotations

import json

import pytest

from rakv_cluster.engine.text import TextStream, TokenBytes
from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.testing.tiny_models import tiny_tokenizer

WORDS = TokenBytes([b"", b"Hello", b" wor", b"ld", b" \xf0\x9f", b"\x98\x80", b"STO", b"P now"])


def test_an_incomplete_character_waits_for_its_last_byte() -> None:
    text = TextStream(WORDS)

    assert text.push([1, 4]).text == "Hello "
    assert text.push([5]).text == "😀"


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    text = TextStream(WORDS)

    assert text.push([4]).text == " "
    assert text.finish().text == "\ufffd"


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    text = TextStream(WORDS, stops=["STOP"])

    first, second = text.push([1, 6]), text.push([7, 1])

    assert (first.text, first.stop) == ("Hello", "")
    assert (second.text, second.stop, second.consumed) == ("", "STOP", 1)


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    text = TextStream(WORDS, stops=["STOPPED"])

    assert text.push([6]).text == ""
    assert text.push([1]).text == "STOHello"


def test_a_held_end_is_shown_when_the_text_ends() -> None:
    text = TextStream(WORDS, stops=["STOP"])
    text.push([6])

    assert text.finish().text == "STO"


def test_a_character_completed_by_the_end_can_be_a_stop() -> None:
    text = TextStream(WORDS, stops=["\ufffd"])
    text.push([4])

    assert text.finish().stop == "\ufffd"


def test_stop_strings_of_the_first_tokens_are_not_searched() -> None:
    text = TextStream(WORDS, stops=["Hello"], min_tokens=1)

    assert text.push([1]).text == "Hello"
    assert text.push([1]).stop == "Hello"


def test_nothing_follows_a_stop() -> None:
    text = TextStream(WORDS, stops=["ld"])
    text.push([3])

    with pytest.raises(ValueError, match="ended"):
        text.push([1])
    assert text.finish().text == ""


def test_ends_count_complete_characters_even_while_they_are_held() -> None:
    text = TextStream(WORDS, stops=["STOP"])

    assert text.push([4, 5, 6]).ends == (1, 2, 5)


def test_special_tokens_and_ids_outside_the_vocabulary_are_no_text() -> None:
    tokenizer = tiny_tokenizer()
    token_bytes = TokenBytes.from_json(tokenizer.backend_tokenizer.to_str())
    ids = tokenizer.encode("<|im_start|>Grüße 😀<|im_end|>")

    assert token_bytes.text([*ids, 10**6, -1]) == "Grüße 😀"


def test_sentencepiece_tokens_are_spaces_and_bytes() -> None:
    spec = {
        "model": {"type": "BPE", "vocab": {"<s>": 0, "\u2581Hi": 1, "<0xF0>": 2, "<0x9F>": 3,
                                           "<0x98>": 4, "<0x80>": 5, "<b>": 6}},
        "added_tokens": [{"id": 0, "content": "<s>", "special": True},
                         {"id": 6, "content": "<b>", "special": False}],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }  # fmt: skip

    token_bytes = TokenBytes.from_json(json.dumps(spec))

    assert token_bytes.text([0, 1, 2, 3, 4, 5, 6]) == " Hi😀<b>"


def test_an_unknown_decoder_is_refused() -> None:
    spec = {"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}

    with pytest.raises(UnsupportedModel, match="WordPiece"):
        TokenBytes.from_json(json.dumps(spec))
