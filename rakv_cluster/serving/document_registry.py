"""Texts that clients have left here, to be named by id in later requests.

In the ingress's memory, by tenant: nobody names another tenant's. A tenant's texts take at most so
many bytes; the one used longest ago goes first. So an id may be unknown again, above all after a
restart; leaving the text once more is cheap, since its KV is still in the store.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rakv_cluster.errors import BodyTooLarge, NotFound

_OVERHEAD_BYTES = 1024
"""What an entry takes besides its text, generously: empty texts must be bounded too."""


@dataclass(frozen=True, slots=True)
class LeftDocument:
    """A text under its id; ``created_s`` is wall time."""

    id: str
    text: str
    created_s: float


class DocumentRegistry:
    """Documents by tenant and id. Bound to one event loop."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_tenant: dict[str, OrderedDict[str, LeftDocument]] = {}
        self._used_bytes: dict[str, int] = {}

    def check(self, document: LeftDocument) -> None:
        """Raise :class:`BodyTooLarge` for one that :meth:`leave` would not take."""
        if _size(document) > self._budget_bytes:
            raise BodyTooLarge(f"a document may have {self._budget_bytes} bytes here", field="text")

    def leave(self, tenant: str, document: LeftDocument) -> None:
        """Keep a text, in place of the one that had its id.

        Raises :class:`BodyTooLarge` for one that is larger than the whole budget.
        """
        self.check(document)
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
            raise NotFound(f"there is no document '{document_id}' here", field=field)
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


def _size(document: LeftDocument) -> int:
    return len(document.text.encode()) + len(document.id.encode()) + _OVERHEAD_BYTES
