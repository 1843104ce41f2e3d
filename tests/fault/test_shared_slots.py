"""Requests that share slots of a buffer while a loader writes into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.store.base import Loaded, LoadItem
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.workers import ManualWorkers
from rakv_cluster.types import FinishReason, Tier

PROMPT = [(index * 5 + 1) % 64 for index in range(40)]


class ScribblingStore(MemoryStore):
    """Once it is :attr:`damaged`, its next load writes over what it is given, lets
    :attr:`meanwhile` happen, and fails; the records are gone then."""

    def __init__(self) -> None:
        super().__init__(1 << 24, ManualClock())
        self.damaged = False
        self.meanwhile: Callable[[], None] = lambda: None

    def load(self, items: Sequence[LoadItem]) -> list[Loaded]:
        if not self.damaged:
            return super().load(items)
        self.damaged = False
        for item in items:
            item.out.fill(1)
        self.delete([item.key for item in items])
        self.meanwhile()
        return [Loaded(ok=False, tier=Tier.DISK) for _ in items]


def test_nobody_shares_what_a_loader_is_writing() -> None:
    """A share may end inside a chunk, where the load that follows begins at the chunk's border."""
    store, clock, loaders = ScribblingStore(), ManualClock(), ManualWorkers()
    engine = EngineHarness(
        FakeRunner(clock=clock),
        store,
        clock,
        settings=EngineSettings(price_loads=False),
        loaders=loaders,
    )
    whole = engine.prompt(PROMPT)
    known = engine.ask(whole, 1)
    while known.finish is None:
        engine.step()
        loaders.run_all()
    first, second, *others = whole.chunks
    store.delete([chunk.prefix_key for chunk in (first, *others)])
    store.damaged, store.meanwhile = True, lambda: engine.core.cancel("request-3")
    prompts = [[*PROMPT[: second.end - 4], *[9] * 20], PROMPT[:30], [*PROMPT[: second.end], 8, 8]]

    answers = [engine.ask(engine.prompt(ids), 5) for ids in prompts]
    for _ in range(50):
        engine.step()
        loaders.run_all()

    assert not store.damaged
    assert [answer.finish for answer in answers] == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    for answer, ids in zip(answers[::2], prompts[::2], strict=True):
        assert answer.token_ids == FakeRunner().generate(ids, 5)
