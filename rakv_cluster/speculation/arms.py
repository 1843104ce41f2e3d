"""Fixed numbers of drafts, which hindsight compares with."""

from __future__ import annotations

from dataclasses import dataclass

from rakv_cluster.speculation.cost_model import StepCosts

ARMS = (0, 1, 2, 3, 4, 7, 8, 15)
"""The paper's, and full packed rows."""


@dataclass(frozen=True, slots=True)
class ArmCosts:
    """What a decision cost, and what every one of :data:`ARMS` would have cost in its place."""

    chosen: int
    chosen_ms: float
    arm_ms: tuple[float, ...]

    @classmethod
    def of(
        cls,
        costs: StepCosts,
        *,
        base_rows: int,
        chosen: int,
        available: int,
        round_ms: float = 0.0,
    ) -> ArmCosts:
        """For one sequence of a step, the others left at one row each; no arm has more drafts than
        were ``available``, and each draft takes ``round_ms`` to make."""
        arm_ms = tuple(
            costs.at(base_rows + drafts) + drafts * round_ms
            for drafts in (min(arm, available) for arm in ARMS)
        )
        return cls(chosen, costs.at(base_rows + chosen) + chosen * round_ms, arm_ms)
