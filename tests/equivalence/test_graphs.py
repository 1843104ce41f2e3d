"""Steps that are recorded and replayed give what plain ones give.

A GPU is not needed: :class:`Tape` keeps the rules of a CUDA graph on the CPU, so a piece that
would go wrong in a graph (a tensor made anew, a Python value that changes) goes wrong here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model import selection
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.graphs import BUCKETS, GraphedLlamaRunner, Work, recorder_for
from rakv_cluster.model.llama import LlamaWeights, llama_weights
from rakv_cluster.model.numerics import observe_numerics
from rakv_cluster.model.selection import ChosenRunner, KernelOptions, choose_runner
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.model.watch import AttentionWatch
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.engine import EngineHarness
from rakv_cluster.testing.tiny_models import tiny_llama
from rakv_cluster.types import SamplingParams

LENGTH = 160
TOLERANCE = 2e-4
Piece = tuple[KvBuffer, torch.Tensor, torch.Tensor]
"""Where it is kept, the sequence's tokens, the positions to run."""


class Tape(TorchDispatchMode):
    """Operations on the very tensors they were recorded with, replayed without their caller."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            # views, and what is done in place, are where they were
            if isinstance(out, torch.Tensor) and again.data_ptr() != out.data_ptr():
                out.copy_(again)


def tape(work: Work) -> Work:
    with Tape() as recorded:
        work()
    return recorded.replay


@pytest.fixture(scope="module")
def weights() -> LlamaWeights:
    return llama_weights(tiny_llama(seed=5))


@pytest.fixture(scope="module")
def plain(weights: LlamaWeights) -> FusedLlamaRunner:
    return FusedLlamaRunner(weights)


@pytest.fixture(scope="module")
def graphed(weights: LlamaWeights) -> GraphedLlamaRunner:
    return GraphedLlamaRunner(weights, tape)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 200, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def buffer(runner: Runner) -> KvBuffer:
    return KvBuffer(torch.zeros(runner.layout.shape(LENGTH)))


def step(*pieces: Piece, wanted: list[int] | None = None) -> Step:
    spans, row = [], 0
    for kept, _, positions in pieces:
        first, last = int(positions[0]), int(positions[-1])
        spans.append(Span(kept, row, row + len(positions), first, last))
        row += len(positions)
    ids = torch.cat([ids[positions] for _, ids, positions in pieces])
    rows = torch.arange(row) if wanted is None else torch.tensor(wanted).long()
    return Step(ids, torch.cat([piece[2] for piece in pieces]), tuple(spans), rows)


@pytest.mark.parametrize("rows", BUCKETS)
def test_as_many_rows_as_a_bucket_has_get_the_plain_kernels_bits(
    rows: int, plain: FusedLlamaRunner, graphed: GraphedLlamaRunner
) -> None:
    ids, results, stored = tokens(1), [], []
    for runner in (plain, graphed):
        kept = buffer(runner)
        runner.forward(step((kept, ids, torch.arange(80))))
        results.append(runner.forward(step((kept, ids, torch.arange(80, 80 + rows)))))
        stored.append(kept.data)
    assert torch.equal(*results)
    assert torch.equal(*stored)


def test_padded_steps_of_all_kinds_equal_plain_ones(
    plain: FusedLlamaRunner, graphed: GraphedLlamaRunner
) -> None:
    first, second = tokens(1), tokens(2)
    results: list[list[torch.Tensor]] = []
    for runner in (plain, graphed):
        one, two = buffer(runner), buffer(runner)
        steps = [
            step((one, first, torch.arange(70)), (two, second, torch.arange(40))),  # not recorded
            step((one, first, torch.arange(70, 71)), (two, second, torch.arange(40, 44))),
            step((one, first, torch.tensor([3, 9, 50])), (two, second, torch.arange(44, 83))),
            step((one, first, torch.arange(71, 74)), wanted=[2]),
            step((one, first, torch.arange(74, 140)), wanted=[0, 30, 65]),
            step((one, first, torch.arange(140, 150)), wanted=[]),
            step((one, first, torch.arange(150, 151))),
        ]
        results.append([runner.forward(each) for each in steps])
        results[-1].append(one.data)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_what_an_earlier_step_left_in_the_padding_does_no_harm(
    graphed: GraphedLlamaRunner,
) -> None:
    ids, kept = tokens(1), buffer(graphed)
    poisoned = KvBuffer(torch.full(graphed.layout.shape(LENGTH), float("nan")))
    graphed.forward(step((kept, ids, torch.arange(20))))
    expected = graphed.forward(step((kept, ids, torch.arange(20, 23))))
    assert graphed.forward(step((poisoned, ids, torch.arange(20, 24)))).isnan().all()
    assert torch.equal(graphed.forward(step((kept, ids, torch.arange(20, 23)))), expected)


def test_logits_stay_as_they_are_when_the_next_step_runs(graphed: GraphedLlamaRunner) -> None:
    ids, kept = tokens(1), buffer(graphed)
    logits = graphed.forward(step((kept, ids, torch.arange(2))))
    before = logits.clone()
    graphed.forward(step((kept, ids, torch.arange(2, 4))))
    assert torch.equal(logits, before)


def test_a_watch_sees_what_it_sees_of_plain_steps(
    plain: FusedLlamaRunner, graphed: GraphedLlamaRunner
) -> None:
    ids, seen = tokens(1), []
    for runner in (plain, graphed):
        kept, watch = buffer(runner), AttentionWatch((0, 1))
        runner.forward(step((kept, ids, torch.arange(100))))
        span = Span(kept, 0, 6, 100, 105, watch)
        positions = torch.arange(100, 106)
        runner.forward(Step(ids[positions], positions, (span,), torch.arange(6)))
        assert watch.rows == 2 * 6
        seen.append(watch.figures(LENGTH))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=7)]
)
def test_batched_and_drafted_tokens_are_those_of_plain_decoding(
    sampling: SamplingParams, plain: FusedLlamaRunner, graphed: GraphedLlamaRunner
) -> None:
    prompts = [tokens(seed)[: 20 + 17 * seed].tolist() for seed in range(5)]
    modes = ("off", "4", "8", "2", "4")

    together = engine(graphed)
    answers = [
        together.ask(together.prompt(prompt), 24, sampling=sampling, speculation=mode)
        for prompt, mode in zip(prompts, modes, strict=True)
    ]
    together.run(*answers)

    for prompt, answer in zip(prompts, answers, strict=True):
        alone = engine(plain)
        expected = alone.ask(alone.prompt(prompt), 24, sampling=sampling, speculation="off")
        alone.run(expected)
        assert answer.token_ids == expected.token_ids


def engine(runner: Runner) -> EngineHarness:
    clock = ManualClock()
    return EngineHarness(
        runner,
        MemoryStore(1 << 24, clock),
        clock,
        settings=EngineSettings(kv_budget_bytes=1 << 24, max_step_tokens=48, max_running=5),
        near_tie_eps=observe_numerics(runner).near_tie_eps,
    )


def choose(monkeypatch: pytest.MonkeyPatch, record: Callable[[Work], Work]) -> ChosenRunner:
    """As on a GPU, with ``record`` in place of its recorder."""
    monkeypatch.setattr(selection, "recorder_for", lambda device: record)
    options = KernelOptions(cuda_graphs=True, packed_budget_bytes=0)
    return choose_runner(tiny_llama(), context_tokens=512, options=options)


def test_they_are_chosen_and_are_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(monkeypatch, tape)
    assert isinstance(chosen.runner, GraphedLlamaRunner)
    assert (chosen.kernels, chosen.refused) == ("fused[plain,graphs]", ())
    assert chosen.numerics.near_tie_eps < 1e-3


@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("piece", ["_run_between", "_run_head"])
def test_a_wrong_piece_is_refused_in_every_bucket(
    piece: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(GraphedLlamaRunner, piece)

    def lost(self: GraphedLlamaRunner, *args: Any) -> None:
        hidden = next(each for each in args if isinstance(each, torch.Tensor))
        if len(hidden) != rows:
            right(self, *args)

    monkeypatch.setattr(GraphedLlamaRunner, piece, lost)
    chosen = choose(monkeypatch, tape)
    assert not isinstance(chosen.runner, GraphedLlamaRunner)
    assert chosen.refused == ("plain,graphs",)
    assert chosen.error < 1e-4


def test_a_failing_recorder_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    chosen = choose(monkeypatch, failing)
    assert type(chosen.runner) is FusedLlamaRunner
    assert chosen.refused == ("plain,graphs",)
    assert "operation not permitted" in caplog.text


def test_without_a_gpu_there_are_none() -> None:
    with pytest.raises(UnsupportedModel, match="need a GPU"):
        recorder_for(torch.device("cpu"))
    options = KernelOptions(cuda_graphs=True)
    chosen = choose_runner(tiny_llama(), context_tokens=512, options=options)
    assert chosen.refused[0] == "plain,graphs"
    assert type(chosen.runner) is FusedLlamaRunner
