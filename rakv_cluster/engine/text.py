"""Token ids to text, piece by piece: never half a character, never part of a stop string.

Both classes are pure state machines over ids. What they emit does not depend on how the ids are
grouped into steps, so speculation and batching cannot change a streamed text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rakv_cluster.errors import UnsupportedModel


class TokenBytes:
    """The bytes each token id stands for; special tokens stand for none.

    Decoding is then byte concatenation plus UTF-8, which is linear and has no window to tune,
    where decoding growing id windows through the tokenizer is quadratic for a run of tokens that
    complete no character.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = tuple(pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def of(self, token_id: int) -> bytes:
        """Bytes of one token; none for ids outside the vocabulary (padded logits columns)."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._pieces), default=0)

    def text(self, token_ids: Sequence[int]) -> str:
        """All of ``token_ids`` decoded at once; bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(self.of(token_id) for token_id in token_ids)
        return raw.decode("utf-8", errors="replace")

    @classmethod
    def from_json(cls, tokenizer_json: str) -> TokenBytes:
        """From a fast tokenizer's serialized form (``tokenizer.json``).

        Knows the two families in use, byte-level and SentencePiece with byte fallback (whose
        decoder's removal of a first space is left out: generated text continues a prompt); raises
        :class:`UnsupportedModel` for another decoder rather than guess at its text.
        """
        spec: dict[str, Any] = json.loads(tokenizer_json)
        kinds = _decoder_kinds(spec.get("decoder"))
        if "ByteLevel" in kinds:
            to_bytes = _byte_level_table()
        elif kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
            to_bytes = None
        else:
            raise UnsupportedModel(
                f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; "
                "supported are byte-level and SentencePiece with byte fallback"
            )
        vocabulary = _vocabulary(spec["model"])
        added = {entry["id"]: entry for entry in spec.get("added_tokens", ())}
        size = 1 + max([*vocabulary, *added], default=-1)
        pieces = [b""] * size
        for token_id, token in vocabulary.items():
            pieces[token_id] = _piece_bytes(token, to_bytes)
        for token_id, entry in added.items():
            pieces[token_id] = b"" if entry["special"] else entry["content"].encode()
        return cls(pieces)


NO_BYTES = TokenBytes(())
"""Of a vocabulary whose text nobody reads: no token stands for any."""


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {kind for part in decoder["decoders"] for kind in _decoder_kinds(part)}
    return {decoder["type"]}


def _vocabulary(model: dict[str, Any]) -> dict[int, str]:
    """Token strings by id; BPE and WordLevel keep a mapping, Unigram a list of pairs."""
    entries = model["vocab"]
    if isinstance(entries, dict):
        return {token_id: token for token, token_id in entries.items()}
    return {token_id: token for token_id, (token, _) in enumerate(entries)}


def _piece_bytes(token: str, byte_level: dict[str, int] | None) -> bytes:
    if byte_level is not None:
        if all(character in byte_level for character in token):
            return bytes(byte_level[character] for character in token)
        return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 as itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Outcome of one :meth:`TextStream.push`.

    ``text`` may be shown now. ``consumed`` counts the ids taken; fewer than were pushed only when
    ``stop`` (the stop string found, else empty) ended the text. ``ends`` says for each id taken
    how many characters, shown or held back, were complete after it.
    """

    text: str
    consumed: int
    ends: tuple[int, ...] = ()
    stop: str = ""


class TextStream:
    """Text of one choice.

    Held back are: an incomplete character, and the longest end of the text that may still become
    a stop string. The stop string that is *completed* first wins (the longest of those that end
    there); the text ends before it. Text of the first ``min_tokens`` tokens is not searched.
    """

    def __init__(
        self, token_bytes: TokenBytes, *, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._characters = 0
        self._held = ""
        self._done = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take ids in order until a stop string is complete."""
        shown: list[str] = []
        ends: list[int] = []
        stop = ""
        for token_id in token_ids:
            self._tokens += 1
            new = self._decoder.decode(self._token_bytes.of(token_id))
            self._characters += len(new)
            text, stop = self._take(new)
            shown.append(text)
            ends.append(self._characters)
            if stop:
                break
        return TextDelta("".join(shown), len(ends), tuple(ends), stop)

    def finish(self) -> TextDelta:
        """What was held back, once no token will follow; an incomplete character as U+FFFD.

        That last character can itself complete a stop string.
        """
        if self._done:
            return TextDelta("", 0)
        text, stop = self._take(self._decoder.decode(b"", final=True), last=True)
        self._done = True
        return TextDelta(text, 0, stop=stop)

    def _take(self, new: str, *, last: bool = False) -> tuple[str, str]:
        """Text to show and the stop string found, after ``new`` was appended."""
        if self._done:
            raise ValueError("the text has already ended")
        text, self._held = self._held + new, ""
        if self._tokens <= self._min_tokens:
            return text, ""
        hits = [(found + len(s), found, s) for s in self._stops if (found := text.find(s)) >= 0]
        if hits:
            self._done = True
            _, start, stop = min(hits)
            return text[:start], stop
        keep = 0 if last else self._undecided(text)
        shown = text[: len(text) - keep]
        self._held = text[len(shown) :]
        return shown, ""

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
