"""Storing new KV off the critical path, so that the next request finds it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from rakv_cluster.chunking.openings import Openings
from rakv_cluster.clock import Clock
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.transfer import HostCopy, Transfer
from rakv_cluster.reuse.selection import Floats
from rakv_cluster.reuse.sensitivity import learn
from rakv_cluster.reuse.traits import Trait, is_known, keep
from rakv_cluster.reuse.workers import Workers
from rakv_cluster.store.base import ChunkRecord, ChunkStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """``writes`` of one key under way, the last of them queued at ``queued_s``."""

    writes: int
    queued_s: float


class Saver:
    """Copies verified slots and hands them to the store on a worker thread.

    At most ``queue_bytes`` of copies wait at once; what does not fit is dropped and counted.
    A record is skipped if the store holds the same tokens (or more) under its key already.
    ``openings`` are those of all records offered, so that they are found at any offset.
    """

    def __init__(
        self,
        store: ChunkStore,
        layout: KvLayout,
        workers: Workers,
        transfer: Transfer,
        clock: Clock,
        *,
        numeric_class: str,
        queue_bytes: int,
        settle_s: float,
        learns: bool = False,
    ) -> None:
        """If it ``learns``, it keeps what the tokens of new contents are found to be like."""
        self._store = store
        self._layout = layout
        self._workers = workers
        self._transfer = transfer
        self._clock = clock
        self._numeric_class = numeric_class
        self._queue_bytes = queue_bytes
        self._settle_s = settle_s
        self._learns = learns
        self.openings = Openings()
        self._lock = threading.Condition()
        self._pending: dict[bytes, _Pending] = {}
        self._queued_bytes = 0
        self._saved = 0
        self._dropped = 0

    @property
    def saved(self) -> int:
        """Records that the store took."""
        return self._saved

    @property
    def dropped(self) -> int:
        """Records lost to a full queue or a failing store."""
        return self._dropped

    def is_pending(self, key: bytes) -> bool:
        """Whether a record under ``key`` is on its way to the store."""
        with self._lock:
            return key in self._pending

    def offer(
        self,
        key: bytes,
        namespace: bytes,
        token_ids: tuple[int, ...],
        *,
        buffer: KvBuffer,
        start: int,
        cost_ms: float,
        importance: Floats,
    ) -> None:
        """Copy ``buffer``'s slots from ``start`` on (all of them verified) and queue the record.

        ``importance`` is what a question behind attended to of them, empty if that is not known.
        """
        nbytes = len(token_ids) * self._layout.bytes_per_token
        with self._lock:
            if self._queued_bytes + nbytes > self._queue_bytes:
                self._dropped += 1
                return
            self._queued_bytes += nbytes
            writes = self._pending[key].writes if key in self._pending else 0
            self._pending[key] = _Pending(writes + 1, self._clock.monotonic_s())
        record = partial(
            ChunkRecord,
            key=key,
            namespace=namespace,
            token_ids=token_ids,
            start=start,
            layout=self._layout,
            cost_ms=cost_ms,
            numeric_class=self._numeric_class,
            created_s=self._clock.wall_s(),
        )
        try:
            copy = self._transfer.to_host(buffer.slots(start, start + len(token_ids)))
        except Exception:  # out of memory comes as any type
            log.warning("no memory for a copy; the chunk is not stored", exc_info=True)
            self._finish(key, nbytes, taken=0, dropped=1)
            return
        if not self._workers.submit(lambda: self._save(key, record, copy, nbytes, importance)):
            self._finish(key, nbytes, taken=0, dropped=1)

    def settle(self, keys: Collection[bytes]) -> None:
        """Wait for pending writes of ``keys``, so that a client's next request sees its last one.

        No write is waited for beyond ``settle_s`` after it was queued: a store that hangs delays
        nobody for long.
        """
        with self._lock:
            queued = [self._pending[key].queued_s for key in keys if key in self._pending]
            if not queued:
                return
            timeout_s = max(queued) + self._settle_s - self._clock.monotonic_s()
            self._lock.wait_for(
                lambda: not any(key in self._pending for key in keys), max(timeout_s, 0.0)
            )

    def _save(
        self,
        key: bytes,
        make: Callable[..., ChunkRecord],
        copy: HostCopy,
        nbytes: int,
        importance: Floats,
    ) -> None:
        taken, dropped = 0, 0
        try:
            record = make(kv=copy.wait())
            self.openings.add(record.token_ids)
            if not self._stored(record):
                taken = self._store.put([record])
                dropped = 1 - taken
                if self._learns:
                    learn(record, self._store)
                    if len(importance) and not is_known(record, Trait.IMPORTANCE, self._store):
                        keep(record, Trait.IMPORTANCE, importance, self._store)
        except Exception:  # the boundary to any store: it never breaks a request
            log.warning("a store failed in put; the chunk is not stored", exc_info=True)
            dropped = 1
        finally:
            self._finish(key, nbytes, taken=taken, dropped=dropped)

    def _finish(self, key: bytes, nbytes: int, *, taken: int, dropped: int) -> None:
        with self._lock:
            self._saved += taken
            self._dropped += dropped
            self._queued_bytes -= nbytes
            pending = self._pending.pop(key)
            if pending.writes > 1:
                self._pending[key] = _Pending(pending.writes - 1, pending.queued_s)
            self._lock.notify_all()

    def _stored(self, record: ChunkRecord) -> bool:
        known = self._store.find([record.key]).get(record.key)
        return (
            known is not None
            and known.numeric_class == record.numeric_class
            and known.lossless
            and known.token_ids[: len(record.token_ids)] == record.token_ids
        )
