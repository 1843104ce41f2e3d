"""The measured cost table: what it learns, what it resists, what it carries over."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from rakv_cluster.errors import ConfigError
from rakv_cluster.speculation.cost_files import (
    CostIdentity,
    costs_path,
    load_costs,
    save_costs,
)
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable, StepCosts

BUCKETS = CostBuckets(rows=(1, 2, 4, 8), context=(256, 1024), batch=(1, 2, 4))
IDENTITY = CostIdentity(machine="host/x", model_digest="ab" * 32, numeric_class="cpu-fp32-2")


def sample(rows: int, ms: float, *, context: int = 256, batch: int = 1) -> CostSample:
    return CostSample(rows=rows, context_tokens=context, batch=batch, ms=ms)


def seeded() -> CostTable:
    table = CostTable(BUCKETS)
    for rows, ms in ((1, 30.0), (2, 33.0), (4, 45.0), (8, 60.0)):
        table.observe(sample(rows, ms))
    return table


def test_an_empty_table_knows_no_cost() -> None:
    table = CostTable(BUCKETS)

    assert table.is_empty
    assert table.step_costs(batch=1, context_tokens=100) == StepCosts()
    assert math.isinf(StepCosts().at(1))


def test_a_step_costs_what_its_bucket_was_measured_at() -> None:
    costs = seeded().step_costs(batch=1, context_tokens=100)

    assert [costs.at(rows) for rows in (1, 2, 3, 4, 5, 8)] == pytest.approx(
        [30.0, 33.0, 45.0, 45.0, 60.0, 60.0]
    )
    assert math.isinf(costs.at(9))


def test_one_stall_moves_a_cost_little_and_a_lasting_change_moves_it_fully() -> None:
    table = seeded()
    for _ in range(20):
        table.observe(sample(2, 33.0))

    table.observe(sample(2, 3_300.0))
    assert table.step_costs(batch=1, context_tokens=1).at(2) < 33.0 * 1.05

    for _ in range(100):
        table.observe(sample(2, 50.0))
    assert table.step_costs(batch=1, context_tokens=1).at(2) == pytest.approx(50.0, rel=0.01)


def test_a_slower_machine_slows_kinds_of_step_that_are_not_in_use() -> None:
    table = seeded()

    for _ in range(100):
        table.observe(sample(1, 60.0))

    costs = table.step_costs(batch=1, context_tokens=1)
    assert costs.at(1) == pytest.approx(60.0, rel=0.01)
    assert costs.at(8) == pytest.approx(120.0, rel=0.01)


def test_a_slower_machine_is_expected_to_be_slow_at_other_contexts_too() -> None:
    table = seeded()
    for _ in range(20):
        table.observe(sample(1, 50.0, context=1_000))
    for _ in range(100):
        table.observe(sample(1, 45.0))

    # The level takes a share of the surprise; the rest stays with the column that showed it.
    assert table.step_costs(batch=1, context_tokens=1_000).at(1) > 53.0


def test_drafted_steps_do_not_move_the_base() -> None:
    table = seeded()

    for _ in range(100):
        table.observe(sample(4, 90.0))

    assert table.step_costs(batch=1, context_tokens=1).at(1) == pytest.approx(30.0)


def test_an_unmeasured_context_takes_the_ratio_of_the_nearest_measured_one() -> None:
    table = seeded()

    table.observe(sample(1, 40.0, context=1_000))

    costs = table.step_costs(batch=1, context_tokens=1_000)
    assert costs.at(1) == pytest.approx(40.0)
    assert costs.at(8) == pytest.approx(80.0)


def test_between_two_contexts_a_step_costs_what_lies_between() -> None:
    table = CostTable(CostBuckets())
    for context, ms in ((64, 30.0), (2_048, 42.0)):
        for rows, ratio in ((1, 1.0), (4, 1.5)):
            table.observe(sample(rows, ms * ratio, context=context))

    def plain_ms(context: int) -> float:
        return table.step_costs(batch=1, context_tokens=context).at(1)

    assert [plain_ms(context) for context in (64, 560, 1_056, 2_048)] == pytest.approx(
        [30.0, 33.0, 36.0, 42.0]
    )
    assert plain_ms(32) == pytest.approx(30.0 - 12.0 * 32 / 1_984)
    assert plain_ms(3_040) == pytest.approx(48.0)
    assert table.step_costs(batch=1, context_tokens=1_056).at(3) == pytest.approx(54.0)


def test_samples_from_all_over_a_bucket_are_not_taken_for_noise() -> None:
    chance = random.Random(5)
    table = CostTable(CostBuckets())
    for context in (64, 2_048):
        table.observe(sample(1, 30.0 + context * 0.006, context=context))

    for _ in range(500):
        context = chance.randrange(1, 2_048)
        table.observe(sample(1, 30.0 + context * 0.006, context=context))

    for context in range(64, 2_048, 64):
        found = table.step_costs(batch=1, context_tokens=context).at(1)
        assert found == pytest.approx(30.0 + context * 0.006, rel=0.01)


def test_an_unmeasured_batch_takes_the_ratio_of_the_nearest_measured_one() -> None:
    table = seeded()

    # Nothing known of two sequences: two rows of one stand in.
    assert table.step_costs(batch=2, context_tokens=10).at(2) == pytest.approx(33.0)

    table.observe(sample(2, 40.0, batch=2))

    costs = table.step_costs(batch=2, context_tokens=10)
    assert costs.rows == (2, 4, 8)
    assert costs.at(2) == pytest.approx(40.0)
    assert costs.at(4) == pytest.approx(40.0 * 45 / 33)


def test_steps_beyond_the_last_rows_bucket_are_not_kept() -> None:
    table = seeded()
    before = table.to_json()

    table.observe(sample(9, 500.0))

    assert table.to_json() == before
    assert table.step_costs(batch=9, context_tokens=1) == StepCosts()


@pytest.mark.parametrize("edges", [(), (0, 1), (2, 2), (4, 1)])
def test_buckets_must_ascend(edges: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        CostBuckets(rows=edges)
    assert caught.value.field == "rows"


def test_saved_costs_come_back(tmp_path: Path) -> None:
    table = seeded()
    path = costs_path(tmp_path, IDENTITY)

    save_costs(path, IDENTITY, table)

    restored = load_costs(path, IDENTITY, BUCKETS)
    assert restored.to_json() == table.to_json()
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_costs_of_another_model_or_bucketing_are_not_used(tmp_path: Path) -> None:
    path = costs_path(tmp_path, IDENTITY)
    save_costs(path, IDENTITY, seeded())

    other = CostIdentity(IDENTITY.machine, "cd" * 32, IDENTITY.numeric_class)

    assert load_costs(path, other, BUCKETS).is_empty
    assert load_costs(path, IDENTITY, CostBuckets()).is_empty
    assert load_costs(tmp_path / "none.json", IDENTITY, BUCKETS).is_empty


def _with_base(data: dict[str, object], value: object) -> str:
    return json.dumps({**data, "bases": [[256, 1, value, 3, 200.0]]})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: "",
        lambda data: "[]",
        lambda data: json.dumps(data)[:-9],
        lambda data: json.dumps({**data, "format": 99}),
        lambda data: json.dumps({**data, "level": float("nan")}),
        lambda data: json.dumps({**data, "ratios": 3}),
        lambda data: _with_base(data, -1.0),
        lambda data: _with_base(data, "x"),
        lambda data: json.dumps({**data, "bases": [[256, 1, 30.0, 3, 900.0]]}),
        lambda data: json.dumps({**data, "ratios": [[1, 2]]}),
        lambda data: json.dumps({**data, "ratios": [[256, 1, 4, 1.5, -1]]}),
        lambda data: json.dumps({**data, "bases": [[256, 1, 30.0, -1, 200.0]]}),
        lambda data: json.dumps({**data, "bases": [[256, 1, 30.0, math.inf, 200.0]]}),
        lambda data: json.dumps({**data, "bases": [[256, 1, 30.0, 3, math.nan]]}),
    ],
)
def test_a_damaged_file_is_an_empty_table(tmp_path: Path, spoil: object) -> None:
    assert callable(spoil)
    path = costs_path(tmp_path, IDENTITY)
    save_costs(path, IDENTITY, seeded())

    path.write_text(spoil(json.loads(path.read_text())))

    assert load_costs(path, IDENTITY, BUCKETS).is_empty


def test_a_wide_step_and_a_plain_one_behind_it_that_are_both_slow_are_the_machines_doing() -> None:
    table = seeded()
    for _ in range(20):
        table.observe(sample(1, 30.0))
        table.observe(sample(4, 45.0))

    for _ in range(2):
        table.observe(sample(4, 90.0))
        assert table.surprised
        table.observe(sample(1, 60.0))

    costs = table.step_costs(batch=1, context_tokens=100)
    assert costs.at(1) == pytest.approx(60.0, rel=0.05)
    assert costs.at(4) / costs.at(1) == pytest.approx(1.5, rel=0.1)


def test_a_wide_step_that_is_slow_beside_plain_ones_is_believed_the_second_time() -> None:
    table = seeded()
    for _ in range(20):
        table.observe(sample(1, 30.0))

    for _ in range(2):
        table.observe(sample(4, 90.0))
        table.observe(sample(1, 30.0))

    assert not table.surprised
    assert table.step_costs(batch=1, context_tokens=100).at(4) == pytest.approx(90.0, rel=0.1)
