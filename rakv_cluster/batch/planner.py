"""In which order to send prompts, so that as much of each as possible is cached. Pure.

A prompt is a sequence of segments (system message, documents, question); the service reuses what
two prompts have in common from their first token on. In the order of a depth-first walk over the
tree of all prefixes, each prompt shares with the one right before it all that it shares with any
earlier one. So a cache that holds a single prompt serves this order as well as an unbounded one
does, and no order can do better: the tree's segments have to be computed once each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile


@dataclass(frozen=True, slots=True)
class Plan:
    """``order`` holds the prompts' indices. The other figures are in the weights' unit:
    ``total`` over all prompts, and what each order lets a prompt reuse from the one right before
    it."""

    order: tuple[int, ...]
    total: int
    reused: int
    reused_as_given: int


def plan(prompts: Sequence[Sequence[Hashable]], weight: Callable[[Hashable], int]) -> Plan:
    """The depth-first order; branches and equal prompts in the order in which they are given."""
    nodes: dict[tuple[int, Hashable], int] = {}
    paths = [_path(prompt, nodes) for prompt in prompts]
    weights = [0, *(weight(segment) for _, segment in nodes)]
    # Nodes are numbered as they are first seen: sorting paths walks the tree depth first.
    order = sorted(range(len(paths)), key=lambda index: paths[index])
    return Plan(
        order=tuple(order),
        total=sum(weights[node] for path in paths for node in path),
        reused=_shared([paths[index] for index in order], weights),
        reused_as_given=_shared(paths, weights),
    )


def _path(prompt: Sequence[Hashable], nodes: dict[tuple[int, Hashable], int]) -> tuple[int, ...]:
    """The numbers of a prompt's prefixes, shortest first; the root is 0."""
    path: list[int] = []
    for segment in prompt:
        step = (path[-1] if path else 0, segment)
        path.append(nodes.setdefault(step, len(nodes) + 1))
    return tuple(path)


def _shared(paths: Sequence[tuple[int, ...]], weights: Sequence[int]) -> int:
    """Weight that each path has in common with the one before it."""
    return sum(
        weights[node]
        for before, path in pairwise(paths)
        for node, _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, before, strict=False))
    )
