"""Where drafts come from. One drafter belongs to one sequence and sees only its accepted tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MIN_MATCH_TOKENS = 1
"""Shortest repeated suffix that is followed. One token is right one time in seven or so, which
pays where a step checks a few drafts at the price of none; elsewhere the controller leaves it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens guessed to come next, in order.

    ``match_tokens`` is the confidence feature: how many tokens at the end of the context were
    seen before in front of this continuation (0: no guess). Of drafts that a model made,
    ``confidences`` are its probabilities, if it was asked for them.
    """

    token_ids: tuple[int, ...] = ()
    match_tokens: int = 0
    confidences: tuple[float, ...] = ()


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses the continuation of one sequence.

    Rejected drafts are simply never passed to :meth:`extend`, so nothing has to be rolled back.
    """

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence grew by these accepted tokens (the prompt first)."""
        ...

    def propose(self, max_tokens: int) -> Draft:
        """At most ``max_tokens`` tokens that may come next."""
        ...


class NullDrafter:
    """Never guesses: speculation off, through the same code."""

    def extend(self, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, max_tokens: int) -> Draft:
        return NO_DRAFT


class SuffixDrafter:
    """Continues the longest suffix of the context that occurred before (prompt-lookup decoding).

    Among equally long matches the most recent wins; a source that keeps predicting right is kept
    (one more token can lengthen the longest match by one at most, so it stays a longest match,
    and no search is needed). Near the end of the context the continuation runs into the tokens it
    has just guessed, as in LZ77, so a loop of three tokens drafts any length.

    Occurrences of each bigram are chained from the latest back, as deflate does; of a single token
    only the latest is known. ``extend`` costs two dictionary accesses a token, a search walks at
    most ``max_candidates`` links and compares at most ``max_match_tokens`` tokens back. At least
    the last ``window_tokens`` tokens are searched; memory holds at most twice as many after each
    call.
    """

    def __init__(
        self,
        *,
        window_tokens: int = 65_536,
        max_candidates: int = 64,
        max_match_tokens: int = 64,
    ) -> None:
        self._window_tokens = window_tokens
        self._max_candidates = max_candidates
        self._max_match_tokens = max_match_tokens
        self._tokens = array("q")
        # Index of the previous occurrence of the bigram that ends here; -1 if none.
        self._previous = array("q")
        self._latest: dict[int, int] = {}
        # Latest index of each token, and where the last token stood before (-1: nowhere).
        self._latest_token: dict[int, int] = {}
        self._before_last = -1
        self._source = -1
        self._match_tokens = 0
        self._matched_at = 0

    @property
    def indexed_tokens(self) -> int:
        """Tokens now held in memory."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, previous, latest = self._tokens, self._previous, self._latest
        latest_token = self._latest_token
        position = len(tokens)
        before = tokens[-1] if position else -1
        tokens.extend(token_ids)
        for token in token_ids:
            bigram = before << 32 | token
            previous.append(latest.get(bigram, -1))
            latest[bigram] = position
            self._before_last = latest_token.get(token, -1)
            latest_token[token] = position
            before = token
            position += 1
        if position > 2 * self._window_tokens:
            self._forget(position - self._window_tokens)

    def propose(self, max_tokens: int) -> Draft:
        end = len(self._tokens)
        if not self._follows(end):
            self._source, self._match_tokens = self._longest_match(end)
        self._matched_at = end
        if self._match_tokens == 0 or max_tokens <= 0:
            return NO_DRAFT
        drafts = self._tokens[self._source : self._source + max_tokens]
        period = end - self._source
        while len(drafts) < max_tokens:
            drafts.append(drafts[len(drafts) - period])
        return Draft(tuple(drafts), self._match_tokens)

    def _follows(self, end: int) -> bool:
        """Move the kept source past the tokens added since it was found, if it predicted them."""
        if self._match_tokens == 0:
            return False
        grown = end - self._matched_at
        added = self._tokens[self._matched_at : end]
        if self._tokens[self._source : self._source + grown] != added:
            return False
        self._source += grown
        self._match_tokens = min(self._match_tokens + grown, self._max_match_tokens)
        return True

    def _longest_match(self, end: int) -> tuple[int, int]:
        """``(index of the token that follows the match, its length)``; length 0 if none."""
        tokens, previous = self._tokens, self._previous
        last = end - 1
        candidate = previous[last] if end else -1
        source, best = -1, 1  # the chain holds matches of two and more
        for _ in range(self._max_candidates):
            if candidate < best or best >= self._max_match_tokens:
                break
            # Only a candidate that also agrees just behind the best match can be longer.
            if tokens[candidate - best] == tokens[last - best]:
                length = self._common(candidate, last)
                if length > best:
                    source, best = candidate + 1, length
            candidate = previous[candidate]
        if source >= 0:
            return source, best
        return (self._before_last + 1, 1) if self._before_last >= 0 else (-1, 0)

    def _common(self, candidate: int, last: int) -> int:
        """Tokens equal going back from both indexes, at most ``max_match_tokens``."""
        tokens = self._tokens
        limit = min(self._max_match_tokens, candidate + 1)
        length = 0
        while length < limit and tokens[candidate - length] == tokens[last - length]:
            length += 1
        return length

    def _forget(self, count: int) -> None:
        """Drop the oldest ``count`` tokens. Linear, once in ``window_tokens`` tokens."""
        del self._tokens[:count]
        self._previous = array("q", (max(at - count, -1) for at in self._previous[count:]))
        self._latest = {gram: at - count for gram, at in self._latest.items() if at >= count}
        self._latest_token = {
            token: at - count for token, at in self._latest_token.items() if at >= count
        }
        self._before_last = max(self._before_last - count, -1)
        self._matched_at -= count
        self._source -= count
        if self._source < 0 or self._matched_at < 0:
            self._match_tokens = 0
