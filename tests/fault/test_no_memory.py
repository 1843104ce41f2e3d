"""Memory that cannot be had: what it was for is left out."""

from __future__ import annotations

import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.transfer import HOST_TRANSFER
from rakv_cluster.reuse.saver import Saver
from rakv_cluster.reuse.selection import unknown
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import NAMESPACE
from rakv_cluster.testing.workers import InlineWorkers


def test_a_copy_that_there_is_no_memory_for_is_dropped_and_counted() -> None:
    layout = KvLayout(layers=1 << 20, kv_heads=1 << 12, head_dim=1 << 12, dtype="float32")
    slots = torch.zeros(1).expand(layout.shape(1))  # 128 TiB where they are copied
    clock = ManualClock()
    saver = Saver(
        MemoryStore(1 << 20, clock),
        layout,
        InlineWorkers(),
        HOST_TRANSFER,
        clock,
        numeric_class="fake",
        queue_bytes=layout.bytes_per_token,
        settle_s=0.0,
    )

    for _ in range(2):
        saver.offer(
            bytes(32), NAMESPACE, (1,), buffer=KvBuffer(slots), start=0, cost_ms=1.0,
            importance=unknown(0),
        )  # fmt: skip

    assert (saver.saved, saver.dropped, saver.is_pending(bytes(32))) == (0, 2, False)
