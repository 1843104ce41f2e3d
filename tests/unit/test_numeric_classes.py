"""KV that another numeric class made: used only where that is allowed, then labelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rakv_cluster.cluster.settings import ClientLimits
from rakv_cluster.cluster.store_client import NodeStore
from rakv_cluster.engine.request import RequestStats
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.kv.codec import encode
from rakv_cluster.serving.grpc_messages import usage
from rakv_cluster.serving.openai_format import Totals
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.lmdb_shard import LmdbStore, ShardSettings, ShardWriter
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.testing.records import load_item, tiny_record
from rakv_cluster.testing.simulated_shards import SimulatedShards
from rakv_cluster.types import ReuseMode

STRICT = EngineSettings(price_loads=False)
SHARING = replace(STRICT, share_across_classes=True)
DOCUMENT = [(index * 5 + 1) % 64 for index in range(40)]
QUESTION = [3, 4, 5]


class Site:
    """Replicas of two numeric classes over one store."""

    def __init__(self, settings: EngineSettings) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(1 << 24, self.clock)
        self.theirs, self.ours = (
            EngineHarness(
                FakeRunner(clock=self.clock),
                self.store,
                self.clock,
                settings=settings,
                numeric_class=name,
            )
            for name in ("theirs", "ours")
        )

    def classes(self) -> set[str]:
        """Numeric classes of the document's records."""
        keys = [chunk.prefix_key for chunk in self.ours.prompt(DOCUMENT, QUESTION).chunks]
        return {found.numeric_class for found in self.store.find(keys).values()}


def ask(engine: EngineHarness, *segments: list[int]) -> tuple[list[int], RequestStats]:
    answer = engine.ask(engine.prompt(*segments), 5)
    engine.run(answer)
    return answer.token_ids, answer.stats


def test_they_are_no_hit_by_default() -> None:
    site = Site(STRICT)
    ask(site.theirs, DOCUMENT, QUESTION)
    assert site.classes() == {"theirs"}

    text, stats = ask(site.ours, DOCUMENT, QUESTION)

    assert text == FakeRunner().generate([*DOCUMENT, *QUESTION], 5)
    assert (stats.cached_tokens, stats.other_class_tokens) == (0, 0)
    assert site.classes() == {"ours"}


def test_where_they_may_be_used_they_are_counted_and_nothing_behind_them_is_stored() -> None:
    site = Site(SHARING)
    ask(site.theirs, DOCUMENT, QUESTION)
    held = site.store.stats().records

    text, stats = ask(site.ours, DOCUMENT, [9] * 12)

    assert text == FakeRunner().generate([*DOCUMENT, *[9] * 12], 5)
    assert stats.other_class_tokens == stats.cached_tokens == len(DOCUMENT)
    assert site.classes() == {"theirs"}
    assert site.store.stats().records == held


def test_who_joins_a_request_that_uses_them_has_them_from_the_store_as_well() -> None:
    site = Site(SHARING)
    ask(site.theirs, DOCUMENT, QUESTION)

    answers = [site.ours.ask(site.ours.prompt(DOCUMENT, [n] * 9), 5) for n in (1, 2)]
    site.ours.run(*answers)

    assert [a.stats.other_class_tokens for a in answers] == [len(DOCUMENT)] * 2
    assert site.classes() == {"theirs"}


def test_what_a_load_replaces_of_a_share_is_not_kept_as_our_own() -> None:
    """A share may end inside a chunk, where the load that follows begins at the chunk's border."""
    site = Site(SHARING)
    ask(site.theirs, DOCUMENT, QUESTION)
    first, second = site.ours.prompt(DOCUMENT, QUESTION).chunks[:2]
    site.store.delete([first.prefix_key])
    shared = DOCUMENT[: second.end - 4]

    answers = [site.ours.ask(site.ours.prompt(ids), 5) for ids in ([*shared, *[9] * 20], DOCUMENT)]
    site.ours.run(*answers)

    assert answers[1].stats.other_class_tokens > 0
    replaced = tuple(shared[second.start :])
    kept = site.store.find(site.store.newest(1000)).values()
    own = [found for found in kept if found.numeric_class == "ours"]
    assert own
    assert [found for found in own if found.token_ids == replaced] == []


def test_a_record_that_was_replaced_after_it_was_found_is_a_miss(tmp_path: Path) -> None:
    """Another class's record may have taken its place under the same key, with equal tokens."""
    clock = ManualClock()
    shards = SimulatedShards(["n0", "n1"], clock, np.random.default_rng(0))
    record = replace(tiny_record(1), numeric_class="theirs")
    shards.hold("n1", encode(record))
    remote = NodeStore("n0", shards, ClientLimits(refresh_s=3600.0), clock)
    remote.refresh()
    stores: list[ChunkStore] = [
        MemoryStore(1 << 20, clock),
        LmdbStore(ShardWriter(tmp_path, ShardSettings(1 << 20), clock)),
        remote,
    ]
    for store in stores:
        store.put([record])
        assert store.find([record.key])[record.key].numeric_class == "theirs"
        for wanted, ok in (("ours", False), ("theirs", True), ("", True)):
            (outcome,) = store.load([replace(load_item(record), numeric_class=wanted)])
            assert outcome.ok is ok
        store.close()


def test_own_kv_is_no_other_class_where_sharing_is_allowed() -> None:
    site = Site(SHARING)
    ask(site.ours, DOCUMENT, QUESTION)

    _, stats = ask(site.ours, DOCUMENT, [9])

    assert (stats.cached_tokens, stats.other_class_tokens) == (len(DOCUMENT), 0)


@pytest.mark.parametrize(
    ("stats", "label"),
    [
        (RequestStats(), "bitwise"),
        (RequestStats(other_class_tokens=1), "numerically equivalent"),
        (RequestStats(other_class_tokens=1, blended_tokens=1), "approximate"),
    ],
)
def test_a_response_says_how_exact_it_is(stats: RequestStats, label: str) -> None:
    totals = Totals(9, ReuseMode.EXACT, 0.0, "bitwise", stats=stats)

    body = totals.rakv(total_ms=1.0)

    assert body["exactness"] == label
    assert body["other_numeric_class_tokens"] == stats.other_class_tokens
    over_grpc = usage(totals, 1.0)
    assert over_grpc.exactness == label
    assert over_grpc.other_numeric_class_tokens == stats.other_class_tokens
