"""The planner: longest stored prefix, never the last token, never slower by its own measure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.chunking.boundaries import ChunkLimits
from rakv_cluster.chunking.keys import ROOT, prefix_key, tail_key
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.reuse.costs import Costs, CostView
from rakv_cluster.reuse.planner import (
    PlannedLoad,
    common_prefix,
    plan_reuse,
    stored_path,
    tail_keys,
    usable,
)
from rakv_cluster.store.base import Found
from rakv_cluster.testing.engine import NAMESPACE, no_cuts
from rakv_cluster.types import ChunkedPrompt, Tier

CUTS = no_cuts(64)
LIMITS = ChunkLimits(min_tokens=4, max_tokens=8)


def prompt_of(*segments: list[int]) -> ChunkedPrompt:
    return chunk_prompt(NAMESPACE, segments, CUTS, LIMITS)


def found(token_ids: tuple[int, ...], *, tier: Tier = Tier.RAM, size: int = 1000) -> Found:
    return Found(token_ids, tier, size, 1.0, "fake", NAMESPACE, 0, 0.0)


class Everything(set[bytes]):
    """A store that was asked for every key there is."""

    def __contains__(self, key: object) -> bool:
        return True


def path_of(prompt: ChunkedPrompt, records: dict[bytes, Found], have: int = 0) -> list[PlannedLoad]:
    return list(stored_path(prompt, records, Everything(), have).loads)


def costs(prefill_ms_per_token: float, ram_ms_per_mb: float = 0.5) -> CostView:
    return CostView(
        {(7, 0): prefill_ms_per_token},
        {1: 1.0},
        {Tier.RAM: ram_ms_per_mb, Tier.DISK: 2.5, Tier.REMOTE: 8.0},
        512,
    )


@given(st.integers(1, 40), st.integers(0, 5))
def test_chunks_are_followed_up_to_the_first_gap(length: int, missing: int) -> None:
    prompt = prompt_of(list(range(length)))
    records = {chunk.prefix_key: found(chunk.token_ids) for chunk in prompt.chunks}
    if missing < len(prompt.chunks):
        del records[prompt.chunks[missing].prefix_key]

    loads = path_of(prompt, records)

    reach = prompt.chunks[: missing if missing < len(prompt.chunks) else None]
    expected = min(reach[-1].end if reach else 0, length - 1)
    assert (loads[-1].end if loads else 0) == expected
    assert [load.start for load in loads] == [
        chunk.start for chunk in reach if chunk.start < expected
    ]


@given(st.integers(2, 30), st.lists(st.integers(0, 63), max_size=30))
def test_a_tail_serves_its_longest_common_prefix(length: int, other: list[int]) -> None:
    wanted = list(range(length))
    prompt = prompt_of(list(range(50, 58)), wanted)
    parent = prompt.chunks[0].prefix_key
    tail = tuple(wanted[: length // 2] + other)
    records = {
        prompt.chunks[0].prefix_key: found(prompt.chunks[0].token_ids),
        tail_key(NAMESPACE, parent): found(tail) if tail else found((63,)),
    }

    loads = path_of(prompt, records)

    shared = min(common_prefix(np.array(tail or (63,)), np.array(wanted)), length - 1)
    assert loads[-1].end == 8 + shared


def test_a_tail_matched_to_its_end_leads_on() -> None:
    first, second = tuple(range(6)), tuple(range(6, 13))
    prompt = prompt_of(list(range(20)))
    behind = prefix_key(NAMESPACE, ROOT, first)
    records = {tail_key(NAMESPACE, ROOT): found(first), tail_key(NAMESPACE, behind): found(second)}

    loads = path_of(prompt, records)

    assert [(load.start, load.end) for load in loads] == [(0, 6), (6, 13)]


def test_what_follows_a_tail_that_diverged_is_another_prefix() -> None:
    diverged, behind = (0, 1, 2, 60), (3, 4, 5)
    prompt = prompt_of(list(range(20)))
    after = prefix_key(NAMESPACE, ROOT, diverged)
    records = {
        tail_key(NAMESPACE, ROOT): found(diverged),
        tail_key(NAMESPACE, after): found(behind),
    }

    loads = path_of(prompt, records)

    assert [(load.start, load.end) for load in loads] == [(0, 3)]


def test_keys_not_asked_for_yet_are_named() -> None:
    prompt = prompt_of(list(range(30)))
    records = {prompt.chunks[0].prefix_key: found(prompt.chunks[0].token_ids)}
    asked = {chunk.prefix_key for chunk in prompt.chunks}

    path = stored_path(prompt, records, asked, 0)

    assert path.probe == tuple(
        tail_keys(NAMESPACE, prompt.chunks[0].prefix_key, prompt.token_ids[8:29])
    )


def test_a_record_with_other_tokens_is_no_hit() -> None:
    prompt = prompt_of(list(range(9)))
    records = {prompt.chunks[0].prefix_key: found(tuple(range(1, 9)))}

    assert path_of(prompt, records) == []


def test_records_of_another_numeric_class_are_used_only_if_allowed() -> None:
    records = {b"k": found((1,))}

    assert usable(records, "other", share_across_classes=False) == {}
    assert usable(records, "other", share_across_classes=True) == records


loads_strategy = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from(list(Tier)), st.integers(0, 50_000_000)),
    max_size=12,
)


@given(loads_strategy, st.integers(0, 500), st.floats(0.001, 5.0), st.integers(1, 500))
def test_no_cut_of_the_path_would_be_faster(
    rows: list[tuple[int, Tier, int]], have: int, rate_ms: float, rest: int
) -> None:
    loads, position = [], 0
    for tokens, tier, size in rows:
        loads.append(PlannedLoad(b"", position, tuple([1] * tokens), tier, size))
        position += tokens
    have = min(have, position + rest - 1)
    prompt = prompt_of([1] * (position + rest))
    view = costs(rate_ms)

    plan = plan_reuse(prompt, tuple(loads), view, have=have)

    def total_ms(chosen: tuple[PlannedLoad, ...]) -> float:
        reach = max([have, *(load.end for load in chosen)])
        load_ms = sum(view.load_ms(load.tier, load.stored_bytes) for load in chosen)
        return load_ms + view.prefill_ms(reach, position + rest)

    cuts = [tuple(loads[:count]) for count in range(len(loads) + 1)]
    assert plan.loads in cuts
    assert total_ms(plan.loads) == pytest.approx(min(total_ms(cut) for cut in cuts))
    assert plan.compute_ms >= plan.load_ms - 1e-6


def test_a_load_slower_than_computing_is_left_out() -> None:
    prompt = prompt_of([1] * 300)
    load = PlannedLoad(b"", 0, tuple([1] * 256), Tier.DISK, 100_000_000)

    assert plan_reuse(prompt, (load,), costs(0.5), have=0).loads == ()
    assert plan_reuse(prompt, (load,), costs(5.0), have=0).loads == (load,)


def test_a_slow_tier_is_believed_at_once_and_tried_again_later() -> None:
    measured = Costs(step_tokens=512)
    prior = measured.view(0.0).load_ms(Tier.DISK, 10_000_000)

    measured.observe_load(Tier.DISK, 10_000_000, 5000.0, now_s=0.0)

    assert measured.view(0.0).load_ms(Tier.DISK, 10_000_000) > 50 * prior
    assert measured.view(1200.0).load_ms(Tier.DISK, 10_000_000) < 1.1 * prior


def test_an_unmeasured_context_costs_what_its_nearest_neighbour_does() -> None:
    measured = Costs(step_tokens=512)
    measured.observe_decode(1, 30.0)
    measured.observe_prefill(0, 512, 512.0)
    measured.observe_prefill(4096, 512, 1024.0)

    view = measured.view(0.0)

    assert view.prefill_rate_ms(512, 0) == 1.0
    assert view.prefill_rate_ms(512, 60_000) == 2.0
    assert view.prefill_ms(0, 1) == 30.0
