"""A whole service in virtual time: what the router brings, and what no fault may do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from rakv_cluster.routing.policy import RoutePolicy, RouteRequest
from rakv_cluster.routing.score import MAX_CROWDING
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.testing.simulated_cluster import (
    Birth,
    ClusterSettings,
    Death,
    Outcome,
    SimulatedCluster,
    SlowDisk,
    ours,
)
from rakv_cluster.testing.simulated_worker import Hardware, SimulatedWorker
from rakv_cluster.testing.traces import DocumentLoad, TraceRequest, block_key, document_questions

SLOW_STORE = Hardware(disk_ms=0.05, remote_ms=0.06, ram_tokens=200_000)
USUAL = ClusterSettings(hardware=(SLOW_STORE,))
LOAD = DocumentLoad(rate_per_s=14.0, requests=500, documents=150)


def least_loaded(
    request: RouteRequest, policy: RoutePolicy, workers: Sequence[SimulatedWorker]
) -> str:
    """Knows every replica's true number of open requests; the first of equals by a fixed mix."""
    turn = int(request.request_id[1:])
    order = [workers[(turn + offset) % len(workers)] for offset in range(len(workers))]
    return min(order, key=lambda worker: worker.open_requests).name


def run(
    settings: ClusterSettings = USUAL,
    load: DocumentLoad = LOAD,
    seed: int = 1,
    rule: object = ours,
) -> list[Outcome]:
    cluster = SimulatedCluster(settings, seed, rule)  # type: ignore[arg-type]  # a function is a Rule
    return cluster.run(document_questions(load, seed))


def median_ttft_ms(outcomes: Sequence[Outcome]) -> float:
    return float(np.median([outcome.ttft_ms for outcome in outcomes]))


def mean_e2e_ms(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([outcome.e2e_ms for outcome in outcomes]))


def answered_once(outcomes: Sequence[Outcome], load: DocumentLoad = LOAD) -> bool:
    return Counter(o.request_id for o in outcomes) == Counter(f"q{n}" for n in range(load.requests))


def test_equal_seeds_give_equal_runs() -> None:
    assert run() == run()
    assert run(seed=2) != run()


def turns(session: str, count: int, every_ms: float) -> list[TraceRequest]:
    """A session that goes on by a chunk with each request."""
    ends = np.arange(1, count + 1, dtype=np.int64) * 256
    keys = tuple(block_key(f"{session}/{number}") for number in range(count))
    return [
        TraceRequest(
            at_ms=number * every_ms, keys=keys[: number + 1], chunk_ends=ends[: number + 1],
            prompt_tokens=int(ends[number]) + 20, output_tokens=10, session=session,
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("deaths", [(), (Death(at_ms=600.0, worker=0),)])
def test_a_session_waits_for_its_answers(deaths: tuple[Death, ...]) -> None:
    """Its next request contains them; other sessions and single requests do not wait for it."""
    sessions = {name: turns(name, 12, every_ms=10.0) for name in ("a", "b", "c")}
    trace = sorted(sum(sessions.values(), turns("", 12, every_ms=10.0)), key=lambda r: r.at_ms)
    cluster = SimulatedCluster(ClusterSettings(replicas=2, deaths=deaths), 1)

    by_id = {outcome.request_id: outcome for outcome in cluster.run(trace)}

    assert len(by_id) == len(trace)
    answered_ms: dict[str, float] = {}
    for number, request in enumerate(trace):
        outcome = by_id[f"q{number}"]
        arrival_ms = max(request.at_ms, answered_ms.get(request.session, 0.0))
        assert outcome.arrived_ms == pytest.approx(arrival_ms)
        if request.session:
            answered_ms[request.session] = outcome.arrived_ms + outcome.e2e_ms


def test_a_slow_store_makes_affinity_pay() -> None:
    assert median_ttft_ms(run()) * 1.25 <= median_ttft_ms(run(rule=least_loaded))


def test_documents_go_back_to_where_they_were() -> None:
    calm = DocumentLoad(rate_per_s=2.0, requests=200, documents=20)
    outcomes = run(load=calm)
    reused = sum(o.reused_tokens for o in outcomes) / sum(o.prompt_tokens for o in outcomes)
    assert reused > 0.8
    assert median_ttft_ms(outcomes) < 30  # 64 tokens to compute, and loads from RAM


def test_one_hot_document_spreads_when_its_replica_is_busy() -> None:
    hot = DocumentLoad(rate_per_s=120.0, requests=600, documents=1)
    share = Counter(outcome.worker for outcome in run(load=hot))
    assert len(share) == 8
    assert max(share.values()) < 600 / 3


def test_many_documents_in_demand_are_not_spread_until_all_replicas_only_load() -> None:
    """What a request gains by leaving a crowded replica, the others may pay for (ADR 0086)."""
    load = DocumentLoad(
        rate_per_s=30.0, requests=500, documents=60, document_tokens=16384, output_tokens=100
    )

    def selfish(
        request: RouteRequest, policy: RoutePolicy, workers: Sequence[SimulatedWorker]
    ) -> str:
        """The same score without the price: as if all open requests wanted the same KV."""
        for number in range(int(MAX_CROWDING)):
            policy.demand.add(f"pretended {number}", request.keys)
        decision = policy.decide(request)
        for number in range(int(MAX_CROWDING)):
            policy.demand.remove(f"pretended {number}")
        policy.book(request, decision, decision.order[0])
        return decision.order[0]

    settings = ClusterSettings(hardware=(SLOW_STORE,))
    priced_ms = median_ttft_ms(run(settings, load))
    assert priced_ms < 0.7 * median_ttft_ms(run(settings, load, rule=selfish))


@pytest.mark.parametrize("ingresses", [1, 4, 16])
def test_ingresses_with_views_of_their_own_do_not_herd(ingresses: int) -> None:
    settings = ClusterSettings(hardware=(SLOW_STORE,), ingresses=ingresses)
    outcomes = run(settings)
    share = Counter(outcome.worker for outcome in outcomes)
    assert max(share.values()) < 2 * LOAD.requests / 8
    assert median_ttft_ms(outcomes) < median_ttft_ms(run(rule=least_loaded))


def test_a_death_loses_no_request() -> None:
    deaths = tuple(Death(at_ms=5_000 * (index + 1), worker=index) for index in range(4))
    outcomes = run(ClusterSettings(hardware=(SLOW_STORE,), deaths=deaths))
    assert answered_once(outcomes)
    assert any(outcome.attempts > 1 for outcome in outcomes)
    late = [o.worker for o in outcomes if o.arrived_ms > 22_000]
    assert not {f"w{index}" for index in range(4)} & set(late)


@pytest.mark.parametrize(("delay_s", "loss"), [(1.1, 0.0), (10.0, 0.0), (1.1, 1.0)])
def test_a_replica_that_joins_takes_work_within_five_seconds(delay_s: float, loss: float) -> None:
    """And goes on to, though all documents are elsewhere."""
    settings = ClusterSettings(
        hardware=(SLOW_STORE,), births=(Birth(at_ms=15_000, worker=7),), ingresses=2,
        report_delay_s=delay_s, report_loss=loss,
    )  # fmt: skip
    outcomes = run(settings)
    assert answered_once(outcomes)
    known_ms = 15_000 + 1e3 * settings.detect_s
    taken = [outcome.arrived_ms for outcome in outcomes if outcome.worker == "w7"]
    assert known_ms <= min(taken) < known_ms + 5_000
    late = Counter(outcome.worker for outcome in outcomes if outcome.arrived_ms > 20_000)
    assert late["w7"] > late.total() / 8 / 4


@pytest.mark.parametrize(("delay_s", "loss"), [(10.0, 0.0), (1.1, 0.5), (1.1, 1.0)])
def test_reports_late_or_lost_cost_speed_only(delay_s: float, loss: float) -> None:
    settings = ClusterSettings(
        hardware=(SLOW_STORE,), report_delay_s=delay_s, report_loss=loss, ingresses=2
    )
    outcomes = run(settings)
    assert answered_once(outcomes)
    share = Counter(outcome.worker for outcome in outcomes)
    assert max(share.values()) < 3 * LOAD.requests / 8


def test_a_slow_disk_loses_its_work_to_others() -> None:
    # No document fits into RAM: what is there does not need the disk.
    disk = Hardware(disk_ms=0.005, remote_ms=0.02, ram_tokens=256)
    load = DocumentLoad(rate_per_s=8.0, requests=600, documents=30)
    slow = SlowDisk(at_ms=20_000, node=0, factor=100.0)
    outcomes = run(ClusterSettings(replicas=4, hardware=(disk,), slow_disks=(slow,)), load)
    after = Counter(o.worker for o in outcomes if o.arrived_ms > 25_000)
    assert after["w0"] < 0.25 * after.total() / 4


def test_faster_hardware_gets_more_work() -> None:
    fast, slow = Hardware(prefill_ms=0.05), Hardware(prefill_ms=0.2)
    load = DocumentLoad(rate_per_s=10.0, requests=400, documents=4000, zipf=0.2)
    share = Counter(o.worker for o in run(ClusterSettings(hardware=(fast, slow)), load))
    fast_share = sum(share[f"w{index}"] for index in range(0, 8, 2))
    assert fast_share > 2 * (share.total() - fast_share)


def test_knowing_the_pace_of_drafting_pays_on_mixed_work() -> None:
    steps = StepCosts((1, 2, 4, 8, 16), (20.0, 20.5, 22.0, 26.0, 36.0))
    copier = Hardware(steps=steps, acceptance={"copy": 0.9, "chat": 0.1})
    plain = Hardware(steps=StepCosts((1,), (14.0,)))
    load = DocumentLoad(
        rate_per_s=4.0, requests=400, documents=40, document_tokens=1024,
        output_tokens=200, kinds=("copy", "chat"),
    )  # fmt: skip
    with_pace = ClusterSettings(hardware=(copier, plain))
    without = ClusterSettings(hardware=(copier, plain), speculation_reported=False)
    assert mean_e2e_ms(run(with_pace, load)) * 1.05 <= mean_e2e_ms(run(without, load))


def test_many_replicas_on_few_nodes() -> None:
    load = DocumentLoad(rate_per_s=300.0, requests=300, documents=400, document_tokens=2048)
    outcomes = run(ClusterSettings(replicas=200, replicas_per_node=8), load)
    assert answered_once(outcomes, load)
    assert len({outcome.worker for outcome in outcomes}) > 50
