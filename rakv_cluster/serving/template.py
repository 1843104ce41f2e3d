"""A chat template taken apart: which text is the template's, which is a client's, where each goes.

The template is rendered once with a sentinel in place of every message's and document's text.
What stands between sentinels is the template's own text and may be tokenized with its control
tokens; what replaces them is a client's and never may. A template that changes, repeats, drops or
reorders what it is given cannot be taken apart this way; the caller then renders it as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]
"""(messages, documents, add_generation_prompt) -> text; raises ``TemplateRefused``."""

# Typographic spaces: what trims text removes them, and no template writes them itself.
_PAD = "\u2002\u2003"
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_SLOT = re.compile(f"({_PAD})?{_OPEN}([mdt])(\\d+){_CLOSE}({_PAD})?")


class TemplateRefused(ValueError):
    """The template raised: the conversation has a shape that the model does not know."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; ``calls`` is JSON: the tools that an assistant called.
    ``name`` is empty if the client gave none."""

    role: Role
    content: str
    calls: str = ""
    name: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Under the names by which templates know them; those without a value are left out."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            fields["tool_calls"] = json.loads(self.calls)
        return fields | {"name": self.name} if self.name else fields


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a request; ``id`` is empty if the client gave none."""

    text: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a text goes: message (m), document text (d) or document title (t) number ``index``.

    The template trims the text on the sides that are flagged.
    """

    kind: str
    index: int
    trim_left: bool
    trim_right: bool


@dataclass(frozen=True, slots=True)
class Skeleton:
    """``literals[0] slot[0] literals[1] ... slot[-1] literals[-1]`` is the rendered prompt."""

    literals: tuple[str, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt text.

    ``field`` is empty for the template's own text and names the request's field for a client's.
    ``starts_segment``: a chunk starts here whatever stands before.
    """

    text: str
    field: str
    starts_segment: bool


def document_text(document: Document) -> str:
    """How a document stands in front of a user's text where the template has no place for it.

    No running index: the same document gives the same text at any place in the list.
    """
    name = f"Document {document.id}" if document.id else "Document"
    return f"{name}:\n{document.text}\n\n"


class ChatTemplate:
    """One model's template; skeletons of recent conversation shapes are kept."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._skeleton = lru_cache(maxsize=64)(self._take_apart)
        self.has_document_slot = self._probe_document_slot()
        self._closers: dict[Role, str] = {}

    def plain(self, messages: Sequence[Message], documents: Sequence[Document]) -> str:
        """The prompt as the template renders it in one go."""
        if documents and not self.has_document_slot:
            messages, documents = _merge_documents(messages, documents), ()
        return self._render(
            [message.fields for message in messages],
            [_document_fields(d.id, d.text) for d in documents],
            True,
        )

    def pieces(
        self, messages: Sequence[Message], documents: Sequence[Document]
    ) -> tuple[Piece, ...]:
        """The prompt in pieces whose texts join to :meth:`plain`; empty if that cannot be had.

        Segments: one per document, one per message (with the template's text that introduces
        it), and one for what asks the model to answer, so that an answer continues the same
        segment in which the next turn's history holds it. Text that introduces a first document
        stays with what stands before it.
        """
        titled = tuple(bool(d.id) for d in documents) if self.has_document_slot else ()
        skeleton = self._skeleton(tuple(replace(m, content="") for m in messages), titled)
        if skeleton is None:
            return ()
        pieces = self._fill(skeleton, messages, documents)
        joined = "".join(piece.text for piece in pieces)
        return tuple(pieces) if joined == self.plain(messages, documents) else ()

    def _fill(
        self, skeleton: Skeleton, messages: Sequence[Message], documents: Sequence[Document]
    ) -> list[Piece]:
        in_front = () if self.has_document_slot else documents
        host = _first_user(messages) if in_front else -1
        pieces: list[Piece] = []
        closer = ""  # what the template writes behind the slot before the literal at hand
        document = -1  # the document whose title or text was placed last
        for literal, slot in zip(skeleton.literals, skeleton.slots, strict=False):
            hosts = slot.kind == "m" and slot.index == host
            opens_document = slot.kind != "m" and slot.index != document
            introduces = not hosts and (slot.kind == "m" or (opens_document and slot.index > 0))
            pieces += _literals(literal, closer, starts_segment=introduces)
            if hosts:
                pieces += [
                    Piece(document_text(d), f"documents.{i}.text", starts_segment=True)
                    for i, d in enumerate(in_front)
                ]
            starts = hosts or (opens_document and slot.index == 0)
            text, field = _slot_text(slot, messages, documents, follows_documents=hosts)
            pieces.append(Piece(text, field, starts))
            closer = self._closer(messages[slot.index].role) if slot.kind == "m" else ""
            document = slot.index if slot.kind != "m" else -1
        pieces += _literals(skeleton.literals[-1], closer, starts_segment=True)
        return _without_empty(pieces)

    def _take_apart(self, shape: tuple[Message, ...], titled: tuple[bool, ...]) -> Skeleton | None:
        """The skeleton of a conversation of these messages, whatever their content, and a document
        per entry of ``titled``."""
        rendered = self._render(
            [replace(m, content=_sentinel("m", i)).fields for i, m in enumerate(shape)],
            [
                _document_fields(_sentinel("t", i) if has_title else "", _sentinel("d", i))
                for i, has_title in enumerate(titled)
            ],
            True,
        )
        literals: list[str] = []
        slots: list[Slot] = []
        position = 0
        for match in _SLOT.finditer(rendered):
            literals.append(rendered[position : match.start()])
            left, kind, index, right = match.groups()
            slots.append(Slot(kind, int(index), trim_left=left is None, trim_right=right is None))
            position = match.end()
        literals.append(rendered[position:])
        found = {kind: [s.index for s in slots if s.kind == kind] for kind in "mdt"}
        titles = [i for i, has_title in enumerate(titled) if has_title]
        intact = (
            found["m"] == list(range(len(shape)))
            and found["d"] == list(range(len(titled)))
            and found["t"] in ([], titles)
        )
        return Skeleton(tuple(literals), tuple(slots)) if intact else None

    def _probe_document_slot(self) -> bool:
        try:
            skeleton = self._take_apart((Message("user", ""),), (False,))
        except TemplateRefused:
            return False
        return skeleton is not None

    def _closer(self, role: Role) -> str:
        """What the template writes behind a message of ``role``, learned from its last one."""
        if role not in self._closers:
            before: list[Role] = ["user"] if role == "assistant" else []
            conversation = [
                {"role": r, "content": _sentinel("m", i)} for i, r in enumerate([*before, role])
            ]
            try:
                rendered = self._render(conversation, [], False)
            except TemplateRefused:
                rendered = ""
            ends = [match.end() for match in _SLOT.finditer(rendered)]
            self._closers[role] = rendered[ends[-1] :] if ends else ""
        return self._closers[role]


def _literals(literal: str, closer: str, *, starts_segment: bool) -> list[Piece]:
    """The template's text between two slots: the end of one, the start of the next."""
    split = len(closer) if literal.startswith(closer) else 0
    return [
        Piece(literal[:split], "", starts_segment=False),
        Piece(literal[split:], "", starts_segment),
    ]


def _without_empty(pieces: Sequence[Piece]) -> list[Piece]:
    """Drop pieces without text; the segment that one of them starts begins at the next."""
    kept: list[Piece] = []
    starts = False
    for piece in pieces:
        starts = starts or piece.starts_segment
        if piece.text:
            kept.append(Piece(piece.text, piece.field, starts))
            starts = False
    return kept


def _slot_text(
    slot: Slot,
    messages: Sequence[Message],
    documents: Sequence[Document],
    *,
    follows_documents: bool,
) -> tuple[str, str]:
    """A slot's text, trimmed as the template would, and the request field it comes from."""
    if slot.kind == "m":
        text, field = messages[slot.index].content, f"messages.{slot.index}.content"
    elif slot.kind == "d":
        text, field = documents[slot.index].text, f"documents.{slot.index}.text"
    else:
        text, field = documents[slot.index].id, f"documents.{slot.index}.id"
    if slot.trim_left and not follows_documents:
        text = text.lstrip()
    return (text.rstrip() if slot.trim_right else text), field


def _first_user(messages: Sequence[Message]) -> int:
    return next(i for i, message in enumerate(messages) if message.role == "user")


def _merge_documents(
    messages: Sequence[Message], documents: Sequence[Document]
) -> Sequence[Message]:
    host = _first_user(messages)
    text = "".join(document_text(document) for document in documents)
    merged = replace(messages[host], content=text + messages[host].content)
    return [merged if i == host else message for i, message in enumerate(messages)]


def _sentinel(kind: str, index: int) -> str:
    return f"{_PAD}{_OPEN}{kind}{index}{_CLOSE}{_PAD}"


def _document_fields(title: str, text: str) -> dict[str, Any]:
    """The names under which templates in use look for a document's parts."""
    fields = {"text": text, "contents": text, "content": text}
    return {"title": title, **fields} if title else fields
