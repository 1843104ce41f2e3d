"""Texts that clients have left here, to be named by id in later requests.

In one process's memory, by tenant: nobody names another tenant's. A tenant's texts take at most so
many bytes; the one used longest ago goes first. So an id may be unknown again, above all after a
restart; leaving the text once more is cheap, since its KV is still in the store.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from rakv_cluster.errors import BodyTooLarge, NotFound

_OVERHEAD_BYTES = 1024
"""What an entry takes besides its text, generously: empty texts must be bounded too."""


@dataclass(frozen=True, slots=True)
class LeftDocument:
    """A text under its id; ``created_s`` is wall time."""

    id: str
    text: str
    created_s: float


class Documents(Protocol):
    """A registry as an ingress sees it, wherever it is: see :class:`DocumentRegistry`.

    All raise :class:`Unavailable` where it cannot be reached.
    """

    async def leave(self, tenant: str, document: LeftDocument) -> None:
        """Keep a text, in place of the one that had its id."""
        ...

    async def get(self, tenant: str, document_id: str, field: str = "id") -> LeftDocument:
        """A tenant's document; raises :class:`NotFound` naming ``field``."""
        ...

    async def all(self, tenant: str) -> tuple[LeftDocument, ...]:
        """A tenant's documents, used longest ago first."""
        ...

    async def remove(self, tenant: str, document_id: str) -> bool:
        """Forget a document; whether there was one."""
        ...


class DocumentRegistry:
    """Documents by tenant and id. Not for several threads."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_tenant: dict[str, OrderedDict[str, LeftDocument]] = {}
        self._used_bytes: dict[str, int] = {}

    def leave(self, tenant: str, document: LeftDocument) -> None:
        """Keep a text, in place of the one that had its id.

        Raises :class:`BodyTooLarge` for one that is larger than the whole budget.
        """
        check_size(document, self._budget_bytes)
        size = _size(document)
        self.remove(tenant, document.id)
        kept = self._by_tenant.setdefault(tenant, OrderedDict())
        kept[document.id] = document
        self._used_bytes[tenant] = self._used_bytes.get(tenant, 0) + size
        while self._used_bytes[tenant] > self._budget_bytes:
            _, oldest = kept.popitem(last=False)
            self._used_bytes[tenant] -= _size(oldest)

    def get(self, tenant: str, document_id: str, field: str = "id") -> LeftDocument:
        """A tenant's document; raises :class:`NotFound` naming ``field``."""
        kept = self._by_tenant.get(tenant, OrderedDict())
        if document_id not in kept:
            raise unknown_document(document_id, field)
        kept.move_to_end(document_id)
        return kept[document_id]

    def all(self, tenant: str) -> tuple[LeftDocument, ...]:
        """A tenant's documents, used longest ago first."""
        return tuple(self._by_tenant.get(tenant, OrderedDict()).values())

    def remove(self, tenant: str, document_id: str) -> bool:
        """Forget a document; whether there was one."""
        removed = self._by_tenant.get(tenant, OrderedDict()).pop(document_id, None)
        if removed is None:
            return False
        self._used_bytes[tenant] -= _size(removed)
        return True


class DocumentsHere:
    """:class:`Documents` in this process."""

    def __init__(self, budget_bytes: int) -> None:
        self._registry = DocumentRegistry(budget_bytes)

    async def leave(self, tenant: str, document: LeftDocument) -> None:
        self._registry.leave(tenant, document)

    async def get(self, tenant: str, document_id: str, field: str = "id") -> LeftDocument:
        return self._registry.get(tenant, document_id, field)

    async def all(self, tenant: str) -> tuple[LeftDocument, ...]:
        return self._registry.all(tenant)

    async def remove(self, tenant: str, document_id: str) -> bool:
        return self._registry.remove(tenant, document_id)


def check_size(document: LeftDocument, budget_bytes: int) -> None:
    """Raise :class:`BodyTooLarge` for a document that no registry of this budget takes."""
    if _size(document) > budget_bytes:
        raise BodyTooLarge(f"a document may have {budget_bytes} bytes here", field="text")


def unknown_document(document_id: str, field: str = "id") -> NotFound:
    """What is raised where a tenant has no such document."""
    return NotFound(f"there is no document '{document_id}' here", field=field)


def _size(document: LeftDocument) -> int:
    return len(document.text.encode()) + len(document.id.encode()) + _OVERHEAD_BYTES
