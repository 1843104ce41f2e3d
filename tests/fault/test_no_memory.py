"""Memory that cannot be had: what it was for is left out, or waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.buffer import BufferPool, KvBuffer
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.transfer import HOST_TRANSFER
from rakv_cluster.reuse.saver import Saver
from rakv_cluster.reuse.selection import unknown
from rakv_cluster.reuse.workers import Workers
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.null import NullStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import NAMESPACE, EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.workers import InlineWorkers, ManualWorkers
from rakv_cluster.types import FinishReason, ReuseMode


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


@dataclass
class Device:
    """Has room for buffers of ``slots`` slots and for none that are larger."""

    slots: int
    refused: list[int] = field(default_factory=list)

    def check(self, slots: int) -> None:
        """As an allocator does."""
        if slots > self.slots:
            self.refused.append(slots)
            raise MemoryError


@dataclass(frozen=True)
class LayoutOn(KvLayout):
    """Of KV on a device whose room is not what the budget says."""

    device: Device

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        self.device.check(tokens)
        return super().shape(tokens)


class RunnerOn(FakeRunner):
    """A model on that device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        here = self._layout
        self._there = LayoutOn(here.layers, here.kv_heads, here.head_dim, here.dtype, device)

    @property
    def layout(self) -> KvLayout:
        return self._there


def ids(seed: int, count: int) -> list[int]:
    return [(seed * 31 + index * index * 7 + index) % 64 for index in range(count)]


def engine_on(device: Device, loaders: Workers | None = None) -> EngineHarness:
    settings = EngineSettings(
        kv_budget_bytes=1 << 20, max_step_tokens=64, max_running=4, growth_tokens=1
    )
    return EngineHarness(
        RunnerOn(device), NullStore(), ManualClock(), settings=settings, loaders=loaders
    )


def pool_on(device: Device) -> BufferPool:
    layout = RunnerOn(device).layout
    return BufferPool(layout, budget_bytes=1 << 20, device=torch.device("cpu"), granule_tokens=4)


def test_a_request_that_the_device_has_no_memory_for_ends_alone() -> None:
    engine = engine_on(Device(slots=256))

    small = engine.ask(engine.prompt(ids(1, 200)), 20)
    large = engine.ask(engine.prompt(ids(2, 300)), 20)
    engine.step()
    assert large.finish is None  # the other one may give back what it needs
    engine.run(small, large)
    later = engine.ask(engine.prompt(ids(3, 9)), 5)
    engine.run(later)

    assert large.finish is FinishReason.NO_MEMORY
    assert small.token_ids == FakeRunner().generate(ids(1, 200), 20)
    assert later.token_ids == FakeRunner().generate(ids(3, 9), 5)


def test_one_that_cannot_grow_makes_room_and_goes_on_when_there_is_memory() -> None:
    device = Device(slots=256)
    engine = engine_on(device)

    other = engine.ask(engine.prompt(ids(1, 9)), 150)
    growing = engine.ask(engine.prompt(ids(2, 230)), 60)
    while not device.refused:
        engine.step()
    assert engine.core.stats().counters.preemptions == 1
    device.slots = 512
    engine.run(other, growing)

    assert other.token_ids == FakeRunner().generate(ids(1, 9), 150)
    assert growing.token_ids == FakeRunner().generate(ids(2, 230), 60)


@pytest.fixture
def hanging() -> ManualWorkers:
    """Loads that are begun and never go on."""
    return ManualWorkers()


def give_up_loads(engine: EngineHarness) -> None:
    engine.clock.advance(EngineSettings().load_deadline_s)


def test_a_load_given_up_without_memory_for_another_buffer_ends_its_request_alone(
    hanging: ManualWorkers,
) -> None:
    device = Device(slots=256)
    engine = engine_on(device, hanging)
    stuck = engine.ask(engine.prompt(ids(1, 200)), 20)
    engine.step()
    device.slots = 0

    give_up_loads(engine)
    engine.run(stuck)
    device.slots = 256
    later = engine.ask(engine.prompt(ids(2, 9)), 5)
    engine.run(later)

    assert stuck.finish is FinishReason.NO_MEMORY
    assert later.token_ids == FakeRunner().generate(ids(2, 9), 5)
    assert engine.core.stats().counters.load_timeouts == 1


def test_it_waits_for_what_others_have(hanging: ManualWorkers) -> None:
    device = Device(slots=256)
    engine = engine_on(device, hanging)
    other = engine.ask(engine.prompt(ids(1, 9)), 20, reuse=ReuseMode.OFF)
    stuck = engine.ask(engine.prompt(ids(2, 200)), 20)
    joined = engine.ask(engine.prompt(ids(2, 200)), 10)
    engine.step()
    device.slots = 0

    give_up_loads(engine)
    engine.run(other, stuck, joined)

    assert other.token_ids == FakeRunner().generate(ids(1, 9), 20)
    assert stuck.token_ids == FakeRunner().generate(ids(2, 200), 20)
    assert joined.token_ids == FakeRunner().generate(ids(2, 200), 10)
    assert engine.core.stats().counters.load_timeouts == 1


def test_a_lease_that_cannot_be_replaced_stays() -> None:
    device = Device(slots=4)
    pool = pool_on(device)
    buffer = pool.lease(4)
    device.slots = 0

    with pytest.raises(MemoryError):
        pool.replace(buffer)
    pool.release(buffer)

    assert (pool.leased_bytes, pool.spare_bytes) == (0, buffer.nbytes)


def test_spares_are_given_up_before_a_lease_fails() -> None:
    class Full(Device):
        def check(self, slots: int) -> None:
            if slots > self.slots and pool.spare_bytes:
                raise MemoryError

    pool = pool_on(Full(slots=4))
    pool.release(pool.lease(4))

    assert pool.lease(16).capacity == 16
    assert pool.spare_bytes == 0


def test_a_device_s_own_error_is_lack_of_memory() -> None:
    class Cuda(Device):
        def check(self, slots: int) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    pool = pool_on(Cuda(slots=0))

    with pytest.raises(MemoryError):
        pool.lease(1)
    assert pool.leased_bytes == 0
