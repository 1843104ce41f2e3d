"""Grammars as part of the token rule: which tokens may stand next.

The library (llguidance) compiles a grammar and then says for any state which ids keep the text on
a path that can be completed. The mask is a function of the grammar and the
tokens in front, so it changes nothing about the rule: batch, cache and drafts still cannot change
a text.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from rakv_cluster.errors import InvalidRequest
from rakv_cluster.model.schema_cycles import endless_reference

_LONGEST_BYTES = 64 * 1024
_KEPT_BYTES = 512 * 1024


class TokenMask(Protocol):
    """Forbids tokens, given those in front of them."""

    def accept(self, token_id: int) -> None:
        """A token was emitted. Raises ``ValueError`` for one that the grammar forbids."""
        ...

    def check(self) -> None:
        """Raise ``ValueError`` if there was a place where the grammar allowed nothing at all."""
        ...

    def forbid(self, row: torch.Tensor, pending: Sequence[int]) -> None:
        """Set scores ``[V]`` of forbidden tokens to -inf, in place, as if ``pending`` had been
        accepted. Behind pending tokens that are themselves forbidden the row cannot count: it
        stays as it is."""
        ...


class Grammars(Protocol):
    """Makes masks for one vocabulary."""

    def __call__(self, grammar: str) -> TokenMask:
        """The mask of a grammar from :func:`schema_grammar`, at its start."""
        ...


def no_grammars(grammar: str) -> TokenMask:
    """:class:`Grammars` of an engine that has no tokenizer."""
    raise InvalidRequest("this engine knows no grammars", field="response_format")


def schema_grammar(schema: Mapping[str, Any], field: str) -> str:
    """The grammar of JSON texts that ``schema`` allows.

    Raises :class:`InvalidRequest` naming ``field`` for what is no JSON Schema, uses keywords that
    cannot be enforced, has a reference that no text can end, or is larger than 64 KiB.
    """
    text = json.dumps(schema)
    if len(text) > _LONGEST_BYTES:
        raise InvalidRequest(f"the schema has more than {_LONGEST_BYTES} bytes", field=field)
    try:
        # Free white space is an invitation to small models never to end.
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        problem = LLMatcher.validate_grammar(grammar, None)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise InvalidRequest(f"the schema cannot be enforced: {problem[:300]}", field=field)
    refuse_endless(schema, field)
    return str(grammar)


def refuse_endless(schema: Mapping[str, Any], field: str) -> None:
    """Raise :class:`InvalidRequest` naming ``field`` for a reference that no text can end."""
    endless = endless_reference(schema)
    if endless:
        raise InvalidRequest(
            f"the schema cannot be enforced: its $ref {endless[:300]!r} leads in a circle that no "
            "text can end",
            field=field,
        )


def lark_grammar(lark: str, field: str) -> str:
    """A grammar in the library's own notation; raises as :func:`schema_grammar` does."""
    if len(lark) > _LONGEST_BYTES:
        raise InvalidRequest(f"the schemas have more than {_LONGEST_BYTES} bytes", field=field)
    try:
        grammar = LLMatcher.grammar_from_lark(lark)
        problem = LLMatcher.validate_grammar(grammar, None)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise InvalidRequest(f"the schemas cannot be enforced: {problem[:300]}", field=field)
    return str(grammar)


class TokenizerGrammars:
    """:class:`Grammars` of one tokenizer. Making it takes some 0.3 s; any thread may use it.

    Compiling takes half a millisecond for a small schema and half a second for the worst of those
    within the limits. Grammars used last are kept compiled, ``kept_bytes`` of their texts: in
    memory they take up to 150 times as much.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        self._tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
        )
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def knows(self, grammar: str) -> bool:
        """Whether it is compiled: its mask takes no time to make."""
        with self._lock:
            return grammar in self._compiled

    def __call__(self, grammar: str) -> TokenMask:
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
        with self._lock:
            self._keep(grammar, matcher)
            return _GrammarMask(matcher.deep_copy())

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        self._compiled[grammar] = matcher
        self._compiled.move_to_end(grammar)
        while self._compiled and sum(map(len, self._compiled)) > self._kept_bytes:
            self._compiled.popitem(last=False)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise InvalidRequest(
                f"the schema cannot be enforced: {matcher.get_error()[:300]}",
                field="response_format",
            )
        return matcher


class _GrammarMask:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} is not what the grammar allows")

    def check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar has no way on: {self._matcher.get_error()[:300]}")

    def forbid(self, row: torch.Tensor, pending: Sequence[int]) -> None:
        ahead = self._matcher.try_consume_tokens(list(pending)) if pending else 0
        if ahead == len(pending):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: len(row)].astype(bool)
            row.masked_fill_(torch.from_numpy(~allowed).to(row.device), float("-inf"))
        self._matcher.rollback(ahead)
