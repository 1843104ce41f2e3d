"""What speculation keeps of a sequence, and its place in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.speculation.controller import RequestState
from rakv_cluster.speculation.draft_rounds import DraftState
from rakv_cluster.speculation.drafters import Drafter
from rakv_cluster.speculation.report import HindsightTally, StepTrace


@dataclass(slots=True)
class Speculation:
    """One request's drafters and learned state; ``followed`` tokens are known to the drafters.

    It began with ``known_tokens``, and at most ``tokens_left`` to come.
    """

    drafter: Drafter
    state: RequestState
    forced: int
    known_tokens: int
    tokens_left: int
    model: DraftState | None = None
    traced: bool = False
    followed: int = 0
    text_drafts: int = 0
    model_drafts: int = 0
    tally: HindsightTally = field(default_factory=HindsightTally)
    trace: list[StepTrace] = field(default_factory=list)

    @property
    def is_off(self) -> bool:
        """Whether this request never drafts."""
        return self.forced == 0


@dataclass(frozen=True, slots=True)
class Seat:
    """A sequence's place in the next step: all its tokens so far, and most drafts it can use.

    ``limit`` comes from :func:`rakv_cluster.speculation.verification.draft_limit`. ``kv`` is the
    KV of all tokens but the last, with room for the drafts; None: there is no model.
    """

    speculation: Speculation
    ids: np.ndarray
    limit: int
    kv: KvBuffer | None = None
