"""A request's texts to token ids, in segments that are tokenized on their own.

Documents and messages are tokenized apart and joined as ids, so that the same text gives the same
ids, hence the same cached chunks, wherever it stands. A client's text is tokenized with every
control token switched off: text that spells one never becomes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from rakv_cluster.engine.text import TokenBytes
from rakv_cluster.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedParameter,
)
from rakv_cluster.serving.template import (
    ChatTemplate,
    Document,
    Message,
    Piece,
    TemplateRefused,
    document_text,
)
from rakv_cluster.serving.tool_calls import OPEN

_TOOL_SETS = 16
Segments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's segments, and which of them are the request's documents.

    ``documents[i]`` is the index of the segment that is document ``i`` and nothing else, whatever
    its place among the others; empty if that is not so for each of them. Documents follow each
    other. Exchanging such segments is rendering the documents in another order.
    """

    segments: Segments
    documents: tuple[int, ...] = ()

    def reordered(self, order: Sequence[int]) -> Segments:
        """The segments with document ``order[k]`` in the ``k``-th place."""
        segments = list(self.segments)
        for place, document in zip(self.documents, order, strict=True):
            segments[place] = self.segments[self.documents[document]]
        return tuple(segments)


@dataclass(frozen=True, slots=True)
class _Encoders:
    """One vocabulary, twice: with control tokens recognized in text, and with none."""

    literal: Tokenizer
    content: Tokenizer
    control_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    adds_space: bool


class PromptRenderer:
    """Turns conversations, prompts and documents into segments of token ids.

    Not bound to an event loop; safe to call from several threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("the model has no fast tokenizer (tokenizer.json)")
        template = tokenizer.chat_template
        source = template if isinstance(template, str) else ""
        serialized = backend.to_str()
        self.token_bytes = TokenBytes.from_json(serialized)
        self._encoders = _encoders(serialized, source, self.token_bytes)
        self._longest_token_bytes = _longest_token_bytes(serialized, self.token_bytes)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(self._render) if template else None
        self.calls_tools = "tools" in source and OPEN in source
        self._with_tools = lru_cache(maxsize=_TOOL_SETS)(self._template_with)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def chat(
        self,
        messages: Sequence[Message],
        documents: Sequence[Document],
        limit_tokens: int = 0,
        tools: str = "",
    ) -> Rendered:
        """Segments of a conversation; the last asks for the answer and is open.

        Raises :class:`InvalidRequest` for a conversation that the template refuses, documents
        without a user message, and text that spells a control token where pieces cannot be told
        apart (see :meth:`ChatTemplate.pieces`); :class:`ContextLengthExceeded`, before seconds go
        into tokenizing megabytes, for text that cannot have less than ``limit_tokens`` (0: none).
        ``tools`` is JSON, what the template is told of tools (empty: nothing).
        """
        template = self._with_tools(tools) if tools else self._template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", field="messages"
            )
        if documents and not any(message.role == "user" for message in messages):
            raise InvalidRequest("documents need a user message to stand in", field="documents")
        self._refuse_control_beside_texts(messages, tools)
        try:
            pieces = () if self._encoders.adds_space else template.pieces(messages, documents)
            if pieces:
                characters = sum(len(piece.text) for piece in pieces)
                self._refuse_hopeless(characters, limit_tokens, "messages")
                return self._encode_pieces(pieces)
            whole = template.plain(messages, documents)
        except TemplateRefused as refusal:
            raise InvalidRequest(f"the chat template: {refusal}", field="messages") from refusal
        self._refuse_hopeless(len(whole), limit_tokens, "messages")
        for index, message in enumerate(messages):
            self._refuse_control(message.content, f"messages.{index}.content")
        self._refuse_control_in(documents)
        return Rendered((tuple(_ids(self._encoders.literal, whole)),))

    def completion(
        self, prompt: str, documents: Sequence[Document], limit_tokens: int = 0
    ) -> Rendered:
        """Segments of a bare prompt, control tokens in it recognized as they are elsewhere.

        Documents stand in front as they do in a chat. Raises :class:`InvalidRequest` as
        :meth:`chat` does.
        """
        fronts = [document_text(document) for document in documents]
        self._refuse_hopeless(len(prompt) + sum(map(len, fronts)), limit_tokens, "prompt")
        if self._encoders.adds_space:
            self._refuse_control_in(documents)
            whole = "".join([*fronts, prompt])
            ids = _ids(self._encoders.literal, whole)
            return Rendered(((*self._encoders.prefix_ids, *ids),))
        pieces = [
            Piece(text, f"documents.{index}.text", starts_segment=True)
            for index, text in enumerate(fronts)
        ]
        return self._encode_pieces(
            [*pieces, Piece(prompt, "", starts_segment=True)], self._encoders.prefix_ids
        )

    def apart(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each text's ids by itself, the first one's behind what every prompt begins with.

        Tokenizers that put a space in front of a text put one in front of each; their models'
        prompts are served whole.
        """
        first, *others = (tuple(_ids(self._encoders.literal, text)) for text in texts)
        return ((*self._encoders.prefix_ids, *first), *others)

    def _refuse_hopeless(self, characters: int, limit_tokens: int, field: str) -> None:
        """A text has at least as many bytes as characters, and a token at most so many bytes."""
        if not limit_tokens or not self._longest_token_bytes:
            return
        least = characters // self._longest_token_bytes
        if least >= limit_tokens:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens; with at least one for the answer the "
                f"model's context holds {limit_tokens}",
                field=field,
            )

    def _encode_pieces(self, pieces: Sequence[Piece], prefix: Sequence[int] = ()) -> Rendered:
        segments: list[list[int]] = []
        fields: list[list[str]] = []
        for piece in pieces:
            if piece.starts_segment or not segments:
                first = not segments
                segments.append([*prefix] if first else [])
                fields.append([""] if first and prefix else [])
            segments[-1] += self._encode(piece)
            fields[-1].append(piece.field)
        kept = [index for index, segment in enumerate(segments) if segment]
        return Rendered(
            tuple(tuple(segments[index]) for index in kept),
            _document_places([fields[index] for index in kept]),
        )

    def _encode(self, piece: Piece) -> list[int]:
        if not piece.field:
            return _ids(self._encoders.literal, piece.text)
        ids = _ids(self._encoders.content, piece.text)
        if not self._encoders.control_ids.isdisjoint(ids):
            # Some vocabularies reach a control token by plain segmentation.
            raise InvalidRequest("text spells a control token of the model", field=piece.field)
        return ids

    def _template_with(self, tools: str) -> ChatTemplate | None:
        """The template of conversations with these tools; None if it has no place for any."""
        if not self.calls_tools:
            raise UnsupportedParameter(
                "this model's chat template has no place for tools", field="tools"
            )
        return ChatTemplate(partial(self._render, tools=json.loads(tools)))

    def _refuse_control_beside_texts(self, messages: Sequence[Message], tools: str) -> None:
        """The template writes tools, calls and names as its own text, control tokens and all."""
        if tools:
            self._refuse_control(tools, "tools")
        for index, message in enumerate(messages):
            if message.calls:
                self._refuse_control(message.calls, f"messages.{index}.tool_calls")
            if message.name:
                self._refuse_control(message.name, f"messages.{index}.name")

    def _refuse_control_in(self, documents: Sequence[Document]) -> None:
        for index, document in enumerate(documents):
            self._refuse_control(document_text(document), f"documents.{index}.text")

    def _refuse_control(self, text: str, field: str) -> None:
        ids = _ids(self._encoders.literal, text)
        if not self._encoders.control_ids.isdisjoint(ids):
            raise InvalidRequest("text spells a control token of the model", field=field)

    def _render(
        self,
        messages: list[dict[str, Any]],
        documents: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                documents=documents or None,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise TemplateRefused(str(error)) from error
        return str(rendered)


def _document_places(fields: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """See :attr:`Rendered.documents`; ``fields`` are those of each segment's pieces."""
    mentioned = [f for each in fields for f in each if f.startswith("documents.")]
    alone = {each[0]: index for index, each in enumerate(fields) if len(each) == 1}
    places = [alone.get(f"documents.{i}.text", -1) for i in range(len(mentioned))]
    movable = places and places == list(range(places[0], places[0] + len(places)))
    return tuple(places) if movable and places[0] >= 0 else ()


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """``text`` alone as ids. Unlike ``encode``, a batch of one lets other threads go on: a text of
    megabytes must not stop every stream of the process."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _longest_token_bytes(serialized: str, token_bytes: TokenBytes) -> int:
    """How much text one token can stand for; 0 where that has no bound that we know.

    Normalizers can make a text shorter before it is cut into tokens, and control tokens stand for
    text of their own, so both have a part in it.
    """
    spec = json.loads(serialized)
    normalizer = spec.get("normalizer") or {"type": "Sequence", "normalizers": []}
    parts = normalizer.get("normalizers", [normalizer])
    for part in parts:
        shortens = part["type"] == "Replace" and not _keeps_length(part)
        if part["type"] not in {"NFC", "Prepend", "Replace"} or shortens:
            return 0
    named = [len(entry["content"].encode()) for entry in spec.get("added_tokens", ())]
    longest = max([token_bytes.longest, *named])
    # Composing (NFC) joins a letter and its marks, up to four characters in all.
    return longest * 4 if any(part["type"] == "NFC" for part in parts) else longest


def _keeps_length(replacement: Mapping[str, Any]) -> bool:
    pattern = replacement["pattern"].get("String", "")
    return bool(pattern) and len(replacement["content"]) >= len(pattern)


def _encoders(serialized: str, template: str, token_bytes: TokenBytes) -> _Encoders:
    literal = Tokenizer.from_str(serialized)
    spec = json.loads(serialized)
    control_ids: set[int] = set()
    for entry in spec.get("added_tokens", ()):
        # Templates also use tokens that are not flagged, such as Qwen's <think>.
        if entry["special"] or (entry["content"].strip() and entry["content"] in template):
            entry["special"] = True
            control_ids.add(entry["id"])
    content = Tokenizer.from_str(json.dumps(spec))
    content.encode_special_tokens = True
    for tokenizer in (literal, content):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    plain = _ids(literal, "x")
    dressed = literal.encode("x").ids
    start = next(i for i in range(len(dressed)) if dressed[i : i + len(plain)] == plain)
    return _Encoders(
        literal=literal,
        content=content,
        control_ids=frozenset(control_ids),
        prefix_ids=tuple(dressed[:start]),
        adds_space=token_bytes.text(plain).startswith(" "),
    )
