"""What the controller weighed and decided for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Reason(str, Enum):
    """Why a step drafts as it does."""

    DRAFTED = "drafted"
    NO_DRAFT = "no_draft"
    NO_COSTS = "no_costs"
    NOT_WORTH = "not_worth"
    GOVERNED = "governed"
    BASELINE = "baseline"
    PROBED = "probed"
    RESTED = "rested"

    @property
    def drafts(self) -> bool:
        """Whether a step for this reason checks drafts that the controller chose."""
        return self in (Reason.DRAFTED, Reason.PROBED)


@dataclass(frozen=True, slots=True)
class Option:
    """A number of rows the step could have, and what it would bring.

    It is judged by ``hoped_ms`` and allowed by ``ms`` (see :class:`StepCosts`), both with a draft
    model's time; catching up counts in the second only, since later steps profit from it too.
    ``needed_ms`` more than a plain step's time must be there for it to be ``allowed``.
    """

    rows: int
    ms: float
    hoped_ms: float
    tokens: float
    needed_ms: float
    allowed: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Drafts per candidate, in order, with the prediction behind it.

    ``base_ms`` is the step with forced drafts only; ``options`` are all that were weighed. A model
    that knows how sure it is of its drafts may go on to ``most``, as long as the chance that all of
    a sequence's are right is at least ``least_chance``.
    """

    drafts: tuple[int, ...]
    most: tuple[int, ...]
    least_chance: float
    reason: Reason
    rows: int
    base_ms: float
    predicted_ms: float
    expected_tokens: float
    allowance_ms: float
    options: tuple[Option, ...] = ()

    def as_made(self, drafts: Sequence[int]) -> Decision:
        """The same with the drafts that a model made, and what is predicted of so many.

        Fewer than were forced are predicted as those: nothing less was weighed.
        """
        if tuple(drafts) == self.drafts:
            return self
        rows = len(drafts) + sum(drafts)
        fitting = (option for option in self.options if option.rows <= rows)
        option = max(fitting, key=lambda option: option.rows, default=self.options[0])
        return replace(
            self,
            drafts=tuple(drafts),
            rows=rows,
            predicted_ms=option.ms,
            expected_tokens=option.tokens,
        )
