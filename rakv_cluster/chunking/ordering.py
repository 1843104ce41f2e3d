"""In which order a set of documents is put, so that the most of it is cached already.

The stored prefixes of a namespace form a tree: a prefix key leads from what stands in front of a
document to what stands behind it. The order is the path through that tree that covers the most
tokens; what no path covers follows in canonical order, so that requests about one set meet in one
order whatever order their clients sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile

from rakv_cluster.chunking.keys import ROOT, prefix_key
from rakv_cluster.types import ChunkedPrompt

Cached = Callable[[Sequence[bytes]], Collection[bytes]]
"""Those of some prefix keys that are (probably) stored."""

MOST_STEPS = 512
"""Prefixes looked behind before the best path so far is taken: there are n! orders."""


def canonical_order(documents: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Indices of ``documents``, each its texts, by the digest of their content.

    Depends on the documents alone: not on the order in which they were sent, nor on any cache.
    """
    digests = [
        sha256("".join(f"{len(text)}:{text}" for text in texts).encode()).digest()
        for texts in documents
    ]
    return tuple(sorted(range(len(digests)), key=digests.__getitem__))


@dataclass(frozen=True, slots=True)
class _Path:
    """Documents one behind the other, what stands behind them, and how much of it is cached.

    ``tokens`` lead the documents and are cached; ``whole``: they are all of them, so that the
    path may go on behind ``key``.
    """

    documents: tuple[int, ...]
    key: bytes
    tokens: int
    whole: bool = True


def cached_order(
    prompt: ChunkedPrompt,
    places: Sequence[tuple[int, int]],
    cached: Cached,
    *,
    most_steps: int = MOST_STEPS,
) -> tuple[int, ...]:
    """The order with the longest cached path, as indices into ``places``.

    ``places`` are the positions ``[start, stop)`` of the documents in ``prompt``, one behind the
    other, given in canonical order; each starts and ends with a chunk. Ties go to the order that is
    first by them.
    """
    documents = [
        [chunk.token_ids for chunk in prompt.chunks if start <= chunk.start < stop]
        for start, stop in places
    ]
    tree = _Tree(prompt.namespace, documents, cached)
    front = [chunk.prefix_key for chunk in prompt.chunks if chunk.end <= places[0][0]]
    best = _Path((), front[-1] if front else ROOT, 0)
    open_paths = [best]
    for _ in range(most_steps):
        if not open_paths:
            break
        longer = tree.longer(open_paths.pop())
        # The first of equally long paths stays.
        best = max([best, *longer], key=lambda path: path.tokens)
        # Depth first, in canonical order.
        open_paths += [path for path in reversed(longer) if path.whole]
    rest = [index for index in range(len(places)) if index not in best.documents]
    return (*best.documents, *rest)


class _Tree:
    """The cached prefixes that the documents make, looked at as far as asked."""

    def __init__(
        self, ns: bytes, documents: Sequence[Sequence[tuple[int, ...]]], cached: Cached
    ) -> None:
        """``documents`` are the ids of each one's chunks."""
        self._ns = ns
        self._documents = documents
        self._cached = cached

    def longer(self, path: _Path) -> list[_Path]:
        """The paths that one more document makes of ``path``, if any of that is cached."""
        firsts = {
            index: prefix_key(self._ns, path.key, chunks[0])
            for index, chunks in enumerate(self._documents)
            if index not in path.documents
        }
        known = set(self._cached(list(firsts.values())))
        return [
            self._followed(path, index, first) for index, first in firsts.items() if first in known
        ]

    def _followed(self, path: _Path, index: int, first: bytes) -> _Path:
        """``path`` with document ``index`` behind it, whose first chunk is cached as ``first``."""
        chunks = self._documents[index]
        keys = [first]
        for ids in chunks[1:]:
            keys.append(prefix_key(self._ns, keys[-1], ids))
        known = {first, *self._cached(keys[1:])}
        there = sum(1 for _ in takewhile(known.__contains__, keys))
        tokens = path.tokens + sum(len(ids) for ids in chunks[:there])
        return _Path((*path.documents, index), keys[-1], tokens, whole=there == len(chunks))
