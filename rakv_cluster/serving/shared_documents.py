"""Texts named by id, known to every ingress: the registry in an actor of the Ray cluster.

The actor is started when it is first needed and outlives the application, as the shards do. If its
node dies, another takes its place, with no texts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rakv_cluster.errors import RakvError, Unavailable
from rakv_cluster.serving.document_registry import DocumentRegistry, LeftDocument

_TIMEOUT_S = 10.0


class SharedDocuments:
    """:class:`~rakv_cluster.serving.document_registry.Documents` of one service and namespace.

    A call takes a few milliseconds; requests that name no document by id make none.
    """

    def __init__(self, budget_bytes: int, *, service: str, namespace: str) -> None:
        self._budget_bytes = budget_bytes
        self._options = {
            "name": f"{service}-documents",
            "namespace": namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": 0,
        }

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

    async def _ask(self, method: str, *given: object) -> Any:
        try:
            # In a thread: naming an actor blocks.
            actor = await asyncio.to_thread(self._actor)
            return await asyncio.wait_for(getattr(actor, method).remote(*given), _TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, RakvError):
                raise error.cause from None
            raise
        except (RayError, asyncio.TimeoutError) as error:
            raise Unavailable("documents by id cannot be reached", retry_after_s=5.0) from error

    def _actor(self) -> Any:
        registry = ray.remote(DocumentRegistry).options(**self._options)
        return registry.remote(self._budget_bytes)
