"""Was it worth it? Break-even acceptance, what was observed, and hindsight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rakv_cluster.speculation.arms import ARMS, ArmCosts
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.speculation.hazards import ScoredTrial
from rakv_cluster.telemetry import Figures


@dataclass(slots=True)
class HindsightTally:
    """What every fixed number of drafts would have brought at the decisions that were made.

    A guess whose tokens all became known says what each arm would have emitted there. Other arms
    would have met other decision points, so this compares at equal positions, not whole runs.
    """

    points: int = 0
    chosen_tokens: float = 0.0
    chosen_ms: float = 0.0
    plain_points: int = 0
    plain_ms: float = 0.0
    arm_tokens: list[float] = field(default_factory=lambda: [0.0] * len(ARMS))
    arm_ms: list[float] = field(default_factory=lambda: [0.0] * len(ARMS))

    def add(self, accepted: int, costs: ArmCosts) -> None:
        """Count a decision point at which ``accepted`` drafts would have been accepted."""
        self.points += 1
        self.chosen_tokens += 1 + min(accepted, costs.chosen)
        self.chosen_ms += costs.chosen_ms
        for index, (drafts, ms) in enumerate(zip(ARMS, costs.arm_ms, strict=True)):
            self.arm_tokens[index] += 1 + min(accepted, drafts)
            self.arm_ms[index] += ms

    def add_plain(self, ms: float) -> None:
        """Count a step at which there was nothing to draft: all arms take ``ms`` for a token."""
        self.points += 1
        self.chosen_tokens += 1
        self.chosen_ms += ms
        self.plain_points += 1
        self.plain_ms += ms

    def add_trial(self, trial: ScoredTrial) -> None:
        """Count a settled guess."""
        self.add(trial.accepted, trial.costs)

    def merge(self, other: HindsightTally) -> None:
        """Add another tally's counts to this one."""
        self.points += other.points
        self.chosen_tokens += other.chosen_tokens
        self.chosen_ms += other.chosen_ms
        self.plain_points += other.plain_points
        self.plain_ms += other.plain_ms
        for index in range(len(ARMS)):
            self.arm_tokens[index] += other.arm_tokens[index]
            self.arm_ms[index] += other.arm_ms[index]

    @property
    def best_arm(self) -> int:
        """The fixed number of drafts with most tokens per ms; 0 before anything was counted."""
        return max(ARMS, key=self.rate)

    def rate(self, arm: int) -> float:
        """Tokens per ms of a fixed number of drafts; 0 where its cost was never measured."""
        ms = self.arm_ms[ARMS.index(arm)] + self.plain_ms
        return self.tokens(arm) / ms if ms else 0.0

    def tokens(self, arm: int) -> float:
        """What a fixed number of drafts would have emitted at all points."""
        return self.arm_tokens[ARMS.index(arm)] + self.plain_points

    @property
    def chosen_rate(self) -> float:
        """Tokens per ms of what was chosen."""
        return self.chosen_tokens / self.chosen_ms if self.chosen_ms else 0.0

    @property
    def regret(self) -> float:
        """Share of the best fixed arm's rate that was missed; negative where it was beaten."""
        best = self.rate(self.best_arm)
        return 1 - self.chosen_rate / best if best else 0.0


def break_even(drafts: int, cost_ratio: float) -> float:
    """Constant acceptance at which ``drafts`` drafts pay for a step ``cost_ratio`` times as dear.

    Solves ``1 + a + ... + a^K = ratio`` by bisection; 1 where even certain drafts do not pay.
    """
    if cost_ratio >= drafts + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**power for power in range(drafts + 1)) < cost_ratio:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One decode step as one of its requests met it.

    ``drafts`` of this request were checked and ``accepted`` of them right, of ``available`` that
    were guessed; ``expected_tokens`` are those of the whole step of ``batch`` requests.
    ``base_ms`` is the plain step by the measured costs and ``predicted_ms`` the step chosen (0:
    never measured); ``measured_ms`` is what it took (0 for a step that was left alone),
    ``control_ms`` what guessing, deciding, a model's drafts and learning took beside it.
    """

    reason: str
    batch: int
    available: int
    drafts: int
    accepted: int
    expected_tokens: float
    base_ms: float
    predicted_ms: float
    measured_ms: float
    control_ms: float


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One fixed number of drafts: what it costs, must bring, and would have brought.

    ``cost_ratio`` is C[K]/C[0], ``tokens_per_step`` the hindsight mean.
    """

    drafts: int
    cost_ratio: float
    break_even_acceptance: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's speculation since start. Shares are of decode steps.

    ``decision_accuracy`` is the share of finished requests whose rate was within the controller's
    margin of the best fixed arm's in hindsight, or above. ``overspend_share`` is the ledger's:
    negative is time saved.
    """

    base_ms: float
    arms: tuple[ArmReport, ...]
    acceptance_by_position: tuple[float, ...]
    steps_by_reason: Mapping[str, int]
    steps_by_drafts: Mapping[int, int]
    draft_ms: float
    overspend_share: float
    best_fixed_drafts: int
    regret: float
    decision_accuracy: float
    requests: int


def figures(report: ReplicaReport) -> Figures:
    """The report as named numbers in base units, for stats and metrics; by number of drafts, place
    in the draft or reason where there are several."""
    return {
        "plain_step_seconds": report.base_ms / 1e3 if math.isfinite(report.base_ms) else 0.0,
        "draft_seconds_total": report.draft_ms / 1e3,
        "overspend_ratio": report.overspend_share,
        "best_fixed_drafts": report.best_fixed_drafts,
        "regret_ratio": report.regret,
        "right_decisions_ratio": report.decision_accuracy,
        "requests_total": report.requests,
        "cost_ratio": {str(arm.drafts): arm.cost_ratio for arm in report.arms},
        "break_even_acceptance_ratio": {
            str(arm.drafts): arm.break_even_acceptance for arm in report.arms
        },
        "tokens_per_step": {str(arm.drafts): arm.tokens_per_step for arm in report.arms},
        "acceptance_ratio": {
            str(place): rate for place, rate in enumerate(report.acceptance_by_position, start=1)
        },
        "decisions_total": dict(report.steps_by_reason),
        "steps_total": {str(drafts): steps for drafts, steps in report.steps_by_drafts.items()},
    }


def arm_reports(costs: StepCosts, tally: HindsightTally) -> tuple[ArmReport, ...]:
    """One line per arm whose cost is known, for one sequence."""
    reports = []
    for drafts in ARMS:
        ratio = costs.at(1 + drafts) / costs.at(1) if costs.rows else math.inf
        if math.isinf(ratio):
            continue
        reports.append(
            ArmReport(
                drafts=drafts,
                cost_ratio=ratio,
                break_even_acceptance=break_even(drafts, ratio) if drafts else 0.0,
                tokens_per_step=tally.tokens(drafts) / max(tally.points, 1),
            )
        )
    return tuple(reports)
