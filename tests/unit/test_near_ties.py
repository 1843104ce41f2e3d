"""Near-ties: whatever rounding does beside other rows, the tokens are those of lone steps."""

from __future__ import annotations

import pytest
import torch

from rakv_cluster.engine.scheduler import Candidate, Share, StepLimits, plan_step
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.model.step import Step
from rakv_cluster.reuse.costs import Costs
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.drafters import NullDrafter
from rakv_cluster.speculation.self_draft import SelfDraft
from rakv_cluster.speculation.speculator import Speculator
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.types import SamplingParams

PROMPT_TOKENS = 20
NEW_TOKENS = 24
EPS = 0.2
SETTINGS = EngineSettings(
    kv_budget_bytes=1 << 20, max_step_tokens=64, max_running=4, growth_tokens=4
)


class RoundingRunner(FakeRunner):
    """Logits on a coarse grid, so that many are equal, and off by up to ``EPS / 2`` each in any
    step of more than one row; how much depends on the rows in the step.

    Rows in front of the first generated token are exact: no replay decides that one.
    """

    def forward(self, step: Step) -> torch.Tensor:
        logits = (super().forward(step) * 4).round() / 4
        rows = len(step.token_ids)
        if rows > 1:
            generator = torch.Generator().manual_seed(rows)
            off = (torch.rand(logits.shape, generator=generator) - 0.5) * EPS * 0.99
            generated = step.positions[step.logit_rows] >= PROMPT_TOKENS
            logits += off * generated[:, None]
        return logits


def ids(seed: int) -> list[int]:
    return [(seed * 31 + index * index * 7 + index) % 64 for index in range(PROMPT_TOKENS)]


def engine(
    eps: float, runner: FakeRunner | None = None, draft_runner: FakeRunner | None = None
) -> EngineHarness:
    """Requests draft from their text, or by a model over their own KV if there is one."""
    clock = ManualClock()
    drafting = () if draft_runner is None else (NullDrafter, SelfDraft(draft_runner, clock))
    return EngineHarness(
        runner or RoundingRunner(clock=clock),
        MemoryStore(1 << 24, clock),
        clock,
        settings=SETTINGS,
        near_tie_eps=eps,
        speculator=Speculator(CostTable(CostBuckets()), ControllerSettings(), clock, *drafting),
    )


SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
}


def alone(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Plain decoding: one row a step from the first generated token on."""
    plain = engine(0.0)
    answer = plain.ask(plain.prompt(prompt), NEW_TOKENS, sampling=sampling, speculation="off")
    plain.run(answer)
    return answer.token_ids


def together(guarded: EngineHarness, sampling: SamplingParams) -> list[list[int]]:
    """Four requests at once, two of them drafting."""
    answers = [
        guarded.ask(guarded.prompt(ids(seed)), NEW_TOKENS, sampling=sampling, speculation=mode)
        for seed, mode in enumerate(("off", "4", "off", "4"))
    ]
    guarded.run(*answers)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_lone_steps(name: str) -> None:
    sampling = SAMPLINGS[name]
    guarded = engine(EPS)

    tokens = together(guarded, sampling)

    assert tokens == [alone(ids(seed), sampling) for seed in range(4)]
    counters = guarded.core.stats().counters
    assert counters.replays > 0
    assert counters.replay_steps >= counters.replays
    assert counters.replay_ms > 0


@pytest.mark.parametrize("name", SAMPLINGS)
def test_so_they_are_where_drafts_are_written_into_the_same_kv(name: str) -> None:
    sampling = SAMPLINGS[name]
    guarded = engine(EPS, draft_runner=RoundingRunner())

    tokens = together(guarded, sampling)

    assert tokens == [alone(ids(seed), sampling) for seed in range(4)]
    assert guarded.core.stats().counters.replays > 0


@pytest.mark.parametrize("name", SAMPLINGS)
def test_without_the_guard_this_model_s_tokens_differ(name: str) -> None:
    """Else the test above would show nothing."""
    tokens = together(engine(0.0), SAMPLINGS[name])
    assert tokens != [alone(ids(seed), SAMPLINGS[name]) for seed in range(4)]


def test_plain_decoding_replays_nothing() -> None:
    guarded = engine(EPS)
    answer = guarded.ask(guarded.prompt(ids(1)), NEW_TOKENS, speculation="off")
    guarded.run(answer)
    assert answer.token_ids == alone(ids(1), SamplingParams())
    assert guarded.core.stats().counters.replays == 0


def test_a_replay_goes_back_to_the_last_lone_step_only() -> None:
    """A stream that was alone until another joined has little to compute again."""
    guarded = engine(EPS)
    first = guarded.ask(guarded.prompt(ids(1)), NEW_TOKENS, speculation="off")
    while len(first.token_ids) < NEW_TOKENS - 2:
        guarded.step()
    second = guarded.ask(guarded.prompt(ids(2)), 4, speculation="off")
    guarded.run(first, second)

    assert first.token_ids == alone(ids(1), SamplingParams())
    counters = guarded.core.stats().counters
    assert counters.replay_steps <= counters.replays * 4


@pytest.mark.parametrize(("turn", "expected"), [(True, (Share(3, 1),)), (False, (Share(1, 1),))])
def test_a_replay_has_every_other_step(turn: bool, expected: tuple[Share, ...]) -> None:
    stream = Candidate(arrival=1, tenant="", position=30, remaining=1, streaming=True)
    replay = Candidate(3, "", 25, 6, streaming=True, alone=True)
    later = Candidate(4, "", 25, 6, streaming=True, alone=True)
    costs = Costs(step_tokens=64).view(0.0)
    limits = StepLimits(64, 16, 3.0, 32)

    assert plan_step([stream, later, replay], {}, limits, costs, lone_turn=turn) == expected
    assert plan_step([replay, later], {}, limits, costs, lone_turn=False) == (Share(3, 1),)


def test_cancelling_during_a_replay_frees_everything() -> None:
    guarded = engine(EPS)
    answers = [
        guarded.ask(guarded.prompt(ids(seed)), NEW_TOKENS, speculation="4") for seed in range(3)
    ]
    while not guarded.core.stats().counters.replays:
        guarded.step()
    guarded.core.cancel_all()
    guarded.core.check_invariants()
    assert guarded.core.stats().kv_leased_bytes == 0
    assert all(answer.finish is not None for answer in answers)
