"""The cache in an operator's hands, as gRPC and HTTP offer it.

KV is named by the text it belongs to; keys are derived here, in the caller's namespace. So nobody
can name, find, pin or remove what is another tenant's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from rakv_cluster.chunking.keys import ROOT
from rakv_cluster.cluster.admin import Drained, StoreAdmin
from rakv_cluster.errors import InvalidRequest, StoreError, Unavailable
from rakv_cluster.reuse.planner import tail_keys
from rakv_cluster.serving.auth import Caller
from rakv_cluster.serving.openai_format import Totals
from rakv_cluster.serving.openai_models import GenerationRequest
from rakv_cluster.serving.run import Run
from rakv_cluster.serving.service import STORED, Service
from rakv_cluster.store.base import StoreStats
from rakv_cluster.telemetry import Figures, ServiceMetrics
from rakv_cluster.types import Chunk, ChunkedPrompt, ReuseMode

ONE_TOKEN: Mapping[str, object] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
"""Fields of a request that is only about its prompt: the least there is to generate."""

_LONGEST_PIN_S = 30 * 86400.0
_LONGEST_OWNER = 64
_LONGEST_DRAIN_S = 3600.0
_THREADS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChunkState:
    """Positions ``[start, end)`` of a prompt, the nodes whose disk has them, and the size there."""

    start: int
    end: int
    nodes: tuple[str, ...]
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Looked:
    """A prompt's chunks in order; the tokens behind the last belong to none yet."""

    prompt_tokens: int
    chunks: tuple[ChunkState, ...]

    @property
    def stored_tokens(self) -> int:
        """Tokens from the prompt's start whose chunks are all on some node."""
        return max((c.end for c in takewhile(lambda c: c.nodes, self.chunks)), default=0)


@dataclass(frozen=True, slots=True)
class Pinned:
    """How many of a prompt's chunks are pinned on at least one node."""

    pinned_chunks: int
    prompt_chunks: int


class CacheApi:
    """Operations on what the nodes' disks hold. Requests are :class:`GenerationRequest` of which
    only the prompt counts.

    All raise :class:`Unavailable` while the store's nodes cannot be reached.
    """

    def __init__(
        self,
        service: Service,
        metrics: ServiceMetrics,
        admin: StoreAdmin,
        *,
        replicas_timeout_s: float = 10.0,
    ) -> None:
        self._replicas_timeout_s = replicas_timeout_s
        self._service = service
        self._metrics = metrics
        self._admin = admin
        # Of its own: shards that hang must not hold the threads in which prompts are tokenized.
        self._threads = ThreadPoolExecutor(_THREADS, "cache-api")

    async def warm(self, request: GenerationRequest, caller: Caller) -> Totals:
        """Compute and store a prompt's KV, as answering it would; the accounts of doing so.

        Where requests store nothing by default, it is computed as those that ask for ``exact``.
        """
        started_s = self._service.clock.monotonic_s()
        if self._service.settings.default_reuse not in STORED:
            request = request.model_copy(update={"reuse": ReuseMode.EXACT.value})
        # By its own name: one token each says nothing of how long answers to chats are.
        prepared = await self._service.prepare(request, caller, endpoint="warm")
        run = Run(
            self._service, self._metrics, prepared, caller, endpoint="warm", started_s=started_s
        )
        async with aclosing(run.updates()) as updates:
            async for _ in updates:
                pass
        return run.totals

    async def lookup(self, request: GenerationRequest, caller: Caller) -> Looked:
        """Which of a prompt's chunks are on which nodes."""
        prepared = await self._service.prepare(request, caller)
        chunks = prepared.choices[0].request.prompt.chunks
        keys = [chunk.prefix_key for chunk in chunks]
        found = await self._answered(lambda: self._admin.lookup(keys))
        states: list[ChunkState] = []
        for chunk in chunks:
            records = {n: r[chunk.prefix_key] for n, r in found.items() if chunk.prefix_key in r}
            sizes = [record.stored_bytes for record in records.values()]
            nodes = tuple(sorted(records))
            states.append(ChunkState(chunk.start, chunk.end, nodes, max(sizes, default=0)))
        return Looked(prepared.prompt_tokens, tuple(states))

    async def pin(
        self, request: GenerationRequest, caller: Caller, owner: str, ttl_s: float
    ) -> Pinned:
        """Keep a prompt's chunks from eviction for ``ttl_s``; needs the admin scope."""
        caller.require_admin()
        name = _owner(caller, owner)
        if not 0 < ttl_s <= _LONGEST_PIN_S:
            raise InvalidRequest(
                f"ttl_s must be above 0 and at most {_LONGEST_PIN_S:.0f}", field="ttl_s"
            )
        chunks = await self._chunks(request, caller)
        keys = [chunk.prefix_key for chunk in chunks]
        pinned = await self._answered(lambda: self._admin.pin(keys, name, ttl_s))
        return Pinned(len({key for held in pinned.values() for key in held}), len(chunks))

    async def unpin(self, request: GenerationRequest, caller: Caller, owner: str) -> int:
        """End an owner's pins of a prompt; how many there were. Needs the admin scope."""
        caller.require_admin()
        name = _owner(caller, owner)
        keys = [chunk.prefix_key for chunk in await self._chunks(request, caller)]
        return sum((await self._answered(lambda: self._admin.unpin(keys, name))).values())

    async def evict(self, request: GenerationRequest, caller: Caller) -> int:
        """Remove a prompt's chunks, and what was seen behind them of its tokens, from all disks and
        replicas; how many records the disks had.

        A request that runs meanwhile and has read them may store them again. Needs the admin scope.
        """
        caller.require_admin()
        prepared = await self._service.prepare(request, caller)
        keys = _all_keys(prepared.choices[0].request.prompt)
        removed = await self._answered(lambda: self._admin.evict(keys))
        # After the disks: what a replica has in RAM by now, it did not just load from one.
        await self._service.backend.forget(keys)
        return sum(len(held) for held in removed.values())

    async def drain(
        self, caller: Caller, node: str, *, limit_bytes: int, deadline_s: float
    ) -> Drained:
        """Copy a node's hottest records to the others before it is removed; needs the admin scope.

        Raises :class:`InvalidRequest` for a node that has no shard or the only one.
        """
        caller.require_admin()
        if not 0 < deadline_s <= _LONGEST_DRAIN_S:
            raise InvalidRequest(
                f"deadline_s must be above 0 and at most {_LONGEST_DRAIN_S:.0f}", field="deadline_s"
            )
        if limit_bytes < 0:
            raise InvalidRequest("limit_bytes must not be negative", field="limit_bytes")
        members = await self._answered(self._admin.members)
        if node not in members:
            known = ", ".join(members)
            raise InvalidRequest(f"no shard on node '{node}', only on {known}", field="node")
        if len(members) < 2:
            raise InvalidRequest("no other node has a shard to take its records", field="node")
        return await self._answered(
            lambda: self._admin.drain(node, limit_bytes=limit_bytes, deadline_s=deadline_s)
        )

    async def shards(self, caller: Caller) -> Mapping[str, StoreStats]:
        """Sizes and counters of every node's shard; needs the admin scope."""
        caller.require_admin()
        return await self._answered(self._admin.stats)

    async def replicas(self, caller: Caller) -> Mapping[str, Figures]:
        """Figures of the replicas that answer in time, by name; needs the admin scope."""
        caller.require_admin()
        try:
            return await asyncio.wait_for(self._service.backend.stats(), self._replicas_timeout_s)
        except asyncio.TimeoutError:
            return {}

    async def _answered(self, call: Callable[[], T]) -> T:
        """What the shards answer; their calls block, so they run in a thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except StoreError as error:
            raise Unavailable("the store's nodes cannot be reached", retry_after_s=5.0) from error

    async def _chunks(self, request: GenerationRequest, caller: Caller) -> tuple[Chunk, ...]:
        prepared = await self._service.prepare(request, caller)
        return prepared.choices[0].request.prompt.chunks


def _all_keys(prompt: ChunkedPrompt) -> list[bytes]:
    """Under which a request for this prompt finds KV: its chunks, and open tails behind them."""
    keys = [chunk.prefix_key for chunk in prompt.chunks]
    borders = [(0, ROOT), *((chunk.end, chunk.prefix_key) for chunk in prompt.chunks)]
    for start, parent in borders:
        keys += tail_keys(prompt.namespace, parent, prompt.token_ids[start:])
    return keys


def _owner(caller: Caller, owner: str) -> str:
    """The name of a pin's owner, apart from those of other tenants."""
    if not 1 <= len(owner) <= _LONGEST_OWNER:
        raise InvalidRequest(f"owner must have 1 to {_LONGEST_OWNER} characters", field="owner")
    return f"{caller.tenant}/{owner}"
