"""Which records can lend their KV to equal tokens elsewhere, and which of several does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rakv_cluster.chunking.keys import content_key

GOOD_CONTEXT_TOKENS = 300
"""KV computed behind at least so many tokens does better elsewhere (research/pic.md, section 3)."""


class Placed(Protocol):
    """What says whether a record is a donor: a record, its head, an answer about it."""

    @property
    def namespace(self) -> bytes: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def start(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Donor:
    """A record under ``key`` whose tokens stood at position ``start``."""

    key: bytes
    start: int


def donated_content(record: Placed) -> bytes:
    """The content key that a record can serve; empty if it lends its KV to nobody.

    KV at position 0 holds the attention sink, which has no place inside a prompt.
    """
    return content_key(record.namespace, record.token_ids) if record.start > 0 else b""


def best_donor(donors: Iterable[Donor]) -> Donor:
    """The first with enough context, else the first. Raises ``ValueError`` if there is none."""
    known = list(donors)
    if not known:
        raise ValueError("no donor to choose from")
    return next((each for each in known if each.start >= GOOD_CONTEXT_TOKENS), known[0])
