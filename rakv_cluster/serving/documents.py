"""The order of a request's documents, chosen before its prompt is cut."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rakv_cluster.chunking.ordering import Cached, cached_order
from rakv_cluster.serving.prompting import Rendered, Segments
from rakv_cluster.types import ChunkedPrompt

DocumentsOrder = Literal["given", "cached", "canonical"]

_MOST_KEYS = 1 << 16


@dataclass(frozen=True, slots=True)
class Placed:
    """The order used: ``indices[k]`` is where the client had the document in place ``k``."""

    order: DocumentsOrder = "given"
    indices: tuple[int, ...] = ()
    ids: tuple[str, ...] = ()


class SeenPrefixes:
    """Keys of the prompts that this process had computed: they are stored, until evicted.

    Bounded, oldest out. A key is a hint: an order chosen by a wrong one costs time, not tokens.
    """

    def __init__(self, elsewhere: Callable[[bytes], bool], *, most_keys: int = _MOST_KEYS) -> None:
        """``elsewhere`` says whether some node's disk is known to hold a key."""
        self._elsewhere = elsewhere
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Sequence[bytes]) -> None:
        """``keys`` are stored now, or will be in a moment."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._most_keys:
                self._keys.popitem(last=False)

    def cached(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of ``keys`` that are probably stored."""
        with self._lock:
            seen = {key for key in keys if key in self._keys}
        return seen | {key for key in keys if key not in seen and self._elsewhere(key)}


def reorder(
    rendered: Rendered, cut: Callable[[Segments], ChunkedPrompt], cached: Cached
) -> tuple[ChunkedPrompt, tuple[int, ...]]:
    """The prompt in the order of which most is cached, and that order.

    Documents are rendered in canonical order; where they cannot change places (the template numbers
    them, say), they stay in it.
    """
    prompt = cut(rendered.segments)
    identity = tuple(range(len(rendered.documents)))
    if len(identity) < 2:
        return prompt, identity
    ends = list(accumulate(len(segment) for segment in rendered.segments))
    places = [(ends[i] - len(rendered.segments[i]), ends[i]) for i in rendered.documents]
    order = cached_order(prompt, places, cached)
    return (prompt, order) if order == identity else (cut(rendered.reordered(order)), order)


def as_sent(field: str | None, places: Sequence[int]) -> str | None:
    """The name of a request's field whose document ``k`` is the client's ``places[k]``."""
    parts = (field or "").split(".")
    if parts[0] != "documents" or len(parts) < 2:
        return field
    return ".".join(["documents", str(places[int(parts[1])]), *parts[2:]])
