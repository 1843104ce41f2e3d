"""The buffer pool against a model of what is leased."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rakv_cluster.kv.buffer import BufferPool, KvBuffer
from rakv_cluster.kv.layout import KvLayout

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=2, dtype="bfloat16")
GRANULE = 4
BUDGET = 20 * GRANULE * LAYOUT.bytes_per_token


class PoolMachine(RuleBasedStateMachine):
    """Leases, writes and returns at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(
            LAYOUT, budget_bytes=BUDGET, device=torch.device("cpu"), granule_tokens=GRANULE
        )
        self.leases: list[KvBuffer] = []

    @rule(tokens=st.integers(0, 30))
    def lease(self, tokens: int) -> None:
        if not self.pool.can_lease(tokens):
            with pytest.raises(MemoryError):
                self.pool.lease(tokens)
            return
        buffer = self.pool.lease(tokens)
        assert buffer.capacity >= tokens
        assert buffer.length == 0
        assert buffer.nbytes <= 2 * self.pool.lease_bytes(tokens)
        assert bool(buffer.data.isfinite().all())
        buffer.data.fill_(len(self.leases) + 1.0)
        self.leases.append(buffer)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), poisoned=st.booleans())
    def give_back(self, data: st.DataObject, poisoned: bool) -> None:
        buffer = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if poisoned:
            buffer.data.fill_(float("nan"))
            self.pool.discard(buffer)
        else:
            self.pool.release(buffer)
        with pytest.raises(KeyError):
            self.pool.release(buffer)

    @invariant()
    def memory_adds_up(self) -> None:
        assert self.pool.leased_bytes == sum(buffer.nbytes for buffer in self.leases)
        assert self.pool.leased_bytes + self.pool.spare_bytes <= BUDGET

    @invariant()
    def leases_do_not_overlap(self) -> None:
        assert len({buffer.data.data_ptr() for buffer in self.leases}) == len(self.leases)


TestPool = PoolMachine.TestCase


def test_a_spare_serves_the_next_lease_of_its_size() -> None:
    cpu = torch.device("cpu")
    pool = BufferPool(LAYOUT, budget_bytes=BUDGET, device=cpu, granule_tokens=GRANULE)
    first = pool.lease(3)
    pool.release(first)

    assert pool.lease(4).data is first.data
