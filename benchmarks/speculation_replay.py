"""The controller on recorded answers, in virtual time: what it decides, apart from the machine.

    python -m benchmarks.speculation_replay [--short] [--json F] [--check] [--seed N]
        [--costs 1:1,2:1,3:1.02,4:1.01,6:1.03,8:1.19,12:1.31,16:1.5]

The texts are prompts and answers of coding agents (another model's: shared data, traces), the
tokenizer is the default model's. A step of R rows takes what ``--costs`` says over a step of one
(default: SmolLM2 fp32 on two quiet cores, docs/experiments.md), times log-normal noise of 5% in
what the controller is told. Arms: fixed numbers of drafts, adaptive in all three modes, and an
oracle that knows the text.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common import Requirement, finish, parse_options, required_data, table
from benchmarks.speculation_ledger import Booked, foresee, overspend, worst_window
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable
from rakv_cluster.speculation.governor import GovernorMode, GovernorSettings
from rakv_cluster.speculation.seats import Seat
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.speculation.verification import draft_limit, judge_block
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.speculation import NO_RULE

COSTS = "1:1,2:1,3:1.02,4:1.01,6:1.03,8:1.19,12:1.31,16:1.5"
FIXED: tuple[SpeculationMode, ...] = ("1", "2", "4", "8")
PLAIN_MS = 29.0
NOISE = 0.05
PREFILL_MS_PER_TOKEN = 0.6
_PROMPT_CHARACTERS = 6_000
_OUTPUT_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request."""

    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An arm over all requests: ``time`` is a share of plain decoding's; the largest loss of a
    request counts its prefill as the governor does, truly and as the ledger had it."""

    time: float
    worst_request: float
    worst_accounted: float
    worst_window: float


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print, return the exit status."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--costs", default=COSTS, help="ROWS:RATIO,... over a step of one row")
    options, names = parse_options(__doc__ or "", argv, extra=extra)
    ratios = {int(rows): float(ratio) for rows, _, ratio in
              (pair.partition(":") for pair in names.costs.split(","))}  # fmt: skip
    requests = list(_recorded(sessions=3 if options.short else 12))
    arms: dict[str, Outcome] = {}
    for mode in FIXED:
        arms[f"K={mode}"] = Replay(ratios, GovernorMode.BUCKET, options.seed).run(requests, mode)
    for governor in GovernorMode:
        arms[governor.value] = Replay(ratios, governor, options.seed).run(requests, "auto")
    oracle = _oracle(requests, ratios)
    lines = [
        (arm, 1 / seen.time, seen.worst_request, seen.worst_accounted, seen.worst_window)
        for arm, seen in arms.items()
    ]
    tokens = sum(len(each.output_ids) for each in requests)
    print(f"{len(requests)} requests, {tokens} tokens; the oracle's speed-up {1 / oracle:.3f}")
    regret = 1 - oracle / arms[GovernorMode.BUCKET.value].time
    print(f"regret of adaptive against the oracle: {regret:.3f}")
    print(table(lines, ("arm", "speed-up", "worst request", "accounted", "worst 1,000 tokens")))
    adaptive = arms[GovernorMode.BUCKET.value]
    best = min(arms[f"K={mode}"].time for mode in FIXED)
    requirements = [
        Requirement("adaptive over the best fixed number", best / adaptive.time, ">=", 1.0),
        Requirement("worst loss over 1,000 tokens", adaptive.worst_window, "<=", 0.01),
        Requirement("largest loss of a request", adaptive.worst_request, "<=", 0.05),
        Requirement("strict: largest accounted loss", arms["strict"].worst_accounted, "<=", 0.01),
    ]
    results = {arm: 1 / seen.time for arm, seen in arms.items()} | {"oracle": 1 / oracle}
    return finish(options, results, requirements)


class Replay:
    """One speculator over recorded requests, one after the other."""

    def __init__(self, ratios: dict[int, float], mode: GovernorMode, seed: int) -> None:
        self._ratios = ratios
        self._chance = random.Random(seed)
        self._accounted: list[float] = []
        costs = CostTable(CostBuckets(rows=tuple(ratios)))
        for context in (256, 2048):
            for rows in ratios:
                costs.observe(CostSample(rows, context, 1, self._told_ms(rows)))
        settings = ControllerSettings(governor=GovernorSettings(mode))
        self._speculator = Speculator(costs, settings, ManualClock())

    def run(self, requests: Sequence[Recorded], mode: SpeculationMode) -> Outcome:
        """Decode every recorded answer again."""
        by_request = [self._request(each, mode) for each in requests]
        steps = [step for mine in by_request for step in mine]
        losses = [
            overspend(mine, PREFILL_MS_PER_TOKEN * len(each.prompt_ids))
            for mine, each in zip(by_request, requests, strict=True)
        ]
        return Outcome(_time(steps), max(losses), max(self._accounted), worst_window(steps))

    def _request(self, recorded: Recorded, mode: SpeculationMode) -> list[Booked]:
        ids = np.array(recorded.prompt_ids + recorded.output_ids)
        done = len(recorded.prompt_ids) + 1
        prefill_ms = PREFILL_MS_PER_TOKEN * len(recorded.prompt_ids)
        sequence = self._speculator.begin(
            mode, ids[:done], NO_RULE, prefill_ms=prefill_ms, tokens_left=len(ids) - done
        )
        steps = []
        while done < len(ids):
            left = len(ids) - done
            seat = Seat(sequence, ids[:done], draft_limit(tokens_left=left, free_slots=left))
            steps.append(self._step(seat, ids[done:].tolist()))
            done += steps[-1].tokens
        self._speculator.finish(sequence, ids)
        ledger = sequence.state.ledger
        self._accounted.append(ledger.overspend_ms / ledger.plain_ms)
        return steps

    def _step(self, seat: Seat, truth: list[int]) -> Booked:
        plain_ms = self._ms(1)
        if self._speculator.rests([seat]):
            return Booked(1, plain_ms, plain_ms)
        plan = self._speculator.plan([seat])
        (drafts,) = plan.drafts
        verdict = judge_block(
            drafts,
            truth[: len(drafts) + 1],
            tokens_left=len(truth),
            stop_token_ids=frozenset(),
        )
        rows = 1 + len(drafts)
        self._speculator.settle(plan, [verdict], forward_ms=self._told_ms(rows))
        return Booked(verdict.emitted, self._ms(rows), plain_ms * verdict.emitted)

    def _ms(self, rows: int) -> float:
        return PLAIN_MS * self._ratios[min(edge for edge in self._ratios if edge >= rows)]

    def _told_ms(self, rows: int) -> float:
        return self._ms(rows) * self._chance.lognormvariate(0, NOISE)


def _time(steps: Sequence[Booked]) -> float:
    return sum(step.spent_ms for step in steps) / sum(step.plain_ms for step in steps)


def _oracle(requests: Sequence[Recorded], ratios: dict[int, float]) -> float:
    costs = CostTable(CostBuckets(rows=tuple(ratios)))
    for rows, ratio in ratios.items():
        costs.observe(CostSample(rows, 256, 1, PLAIN_MS * ratio))
    seen = [foresee(each.prompt_ids, each.output_ids, costs, ()) for each in requests]
    return sum(each.oracle_ms for each in seen) / sum(each.plain_ms for each in seen)


def _recorded(sessions: int) -> Iterator[Recorded]:
    """Up to ten requests of each session; prompts are cut to their end."""
    tokenizer = load_tokenizer(resolve("smollm2", load_settings().cache_path))

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    folder = required_data("traces/agent_miniswe")
    for path in sorted(folder.glob("*.jsonl"))[:sessions]:
        for line in path.read_text().splitlines()[:10]:
            row = json.loads(line)
            prompt = row["input"] if isinstance(row["input"], str) else json.dumps(row["input"])
            output = row["output"] if isinstance(row["output"], str) else json.dumps(row["output"])
            answer = ids(output)[:_OUTPUT_TOKENS]
            if len(answer) > 20:
                yield Recorded(ids(prompt[-_PROMPT_CHARACTERS:]), answer)


if __name__ == "__main__":
    sys.exit(main())
