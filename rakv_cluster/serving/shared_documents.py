"""Texts named by id, known to every ingress: the registry in an actor of the Ray cluster.

The actor is started with the ingress and outlives the application, as the shards do. If it dies,
or its node, another takes its place, with no texts; until that answers, whoever calls has to come
again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from rakv_cluster.errors import RakvError, Unavailable
from rakv_cluster.serving.document_registry import DocumentRegistry, LeftDocument

_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0
"""A process starts meanwhile, on a node that may be busy with loading models."""


class SharedDocuments:
    """:class:`~rakv_cluster.serving.document_registry.Documents` of one service and namespace.

    A call takes a few milliseconds; requests that name no document by id make none. The actor is
    looked up by its name with the first call, and again when it has died.
    """

    def __init__(self, budget_bytes: int, *, service: str, namespace: str) -> None:
        self._budget_bytes = budget_bytes
        self._registry: Any = None  # the actor's handle, once it was named
        self._options = {
            "name": f"{service}-documents",
            "namespace": namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": 0,
        }

    async def start(self) -> None:
        """Start the registry where it does not run, and wait until it answers.

        Raises :class:`Unavailable` where it has not within a bounded time; it may later.
        """
        await self._ask("all", "", timeout_s=_START_TIMEOUT_S)

    async def leave(self, tenant: str, document: LeftDocument) -> None:
        await self._ask("leave", tenant, document)

    async def get(self, tenant: str, document_id: str, field: str = "id") -> LeftDocument:
        found: LeftDocument = await self._ask("get", tenant, document_id, field)
        return found

    async def all(self, tenant: str) -> tuple[LeftDocument, ...]:
        found: tuple[LeftDocument, ...] = await self._ask("all", tenant)
        return found

    async def remove(self, tenant: str, document_id: str) -> bool:
        return bool(await self._ask("remove", tenant, document_id))

    async def _ask(self, method: str, *given: object, timeout_s: float = _TIMEOUT_S) -> Any:
        try:
            try:
                return await self._call(method, *given, timeout_s=timeout_s)
            except ActorDiedError:  # for good; one that starts again keeps its handle
                self._registry = None
                return await self._call(method, *given, timeout_s=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RakvError):
                raise error.cause from None
            raise
        except (RayError, asyncio.TimeoutError) as error:
            raise _unreached() from error

    async def _call(self, method: str, *given: object, timeout_s: float) -> Any:
        if self._registry is None:
            # In a thread: naming an actor blocks.
            self._registry = await asyncio.to_thread(self._named)
        answer = getattr(self._registry, method).remote(*given)
        return await asyncio.wait_for(answer, timeout_s)

    def _named(self) -> Any:
        registry = ray.remote(DocumentRegistry).options(**self._options)
        try:
            return registry.remote(self._budget_bytes)
        except ValueError as error:  # the one of that name is just going
            raise _unreached() from error


def _unreached() -> Unavailable:
    return Unavailable("documents by id cannot be reached", retry_after_s=5.0)
