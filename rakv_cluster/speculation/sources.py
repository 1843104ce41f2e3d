"""Where a sequence's drafts come from: its own text, or a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from rakv_cluster.clock import Clock
from rakv_cluster.model.sampling import TokenRule
from rakv_cluster.speculation.controller import (
    Candidate,
    ControllerSettings,
    ReplicaState,
    promise,
)
from rakv_cluster.speculation.cost_model import StepCosts
from rakv_cluster.speculation.decision import Decision
from rakv_cluster.speculation.draft_rounds import DraftState, DraftWish, ModelDrafter, Stopping
from rakv_cluster.speculation.drafters import NO_DRAFT, Draft
from rakv_cluster.speculation.seats import Seat

log = logging.getLogger(__name__)


class Sources:
    """Chooses between a text's guess, which is there, and a model's, which is yet to be made."""

    def __init__(
        self,
        settings: ControllerSettings,
        replica: ReplicaState,
        clock: Clock,
        model: ModelDrafter | None,
    ) -> None:
        """``model`` is asked where it promises more than a sequence's own drafter."""
        self._settings = settings
        self._replica = replica
        self._clock = clock
        self._draft_model = model
        if model is not None:
            replica.hazards.assume(model.agreement)

    def begin(self, rule: TokenRule) -> DraftState | None:
        """What the model keeps of a new sequence; None if there is no model."""
        return DraftState(rule) if self._draft_model is not None else None

    def finish(self, state: DraftState | None) -> None:
        """The sequence ended: free what the model holds of it."""
        if state is not None and self._draft_model is not None:
            self._draft_model.close(state)

    def candidate(self, seat: Seat, text: Draft, costs: StepCosts, batch: int) -> Candidate:
        """The text's guess, or what the model could make in its place if that promises more.

        For a fixed number of drafts, the model is asked only where there is no guess.
        """
        forced = seat.speculation.forced
        guessed = Candidate(seat.speculation.state, len(text.token_ids), text.match_tokens, forced)
        drawn = self._by_model(seat)
        if drawn is None or (guessed.available and forced >= 0):
            return guessed
        if not guessed.available:
            return drawn
        guessed = replace(guessed, spare_ms=drawn.round_ms)
        ours, theirs = (
            promise(self._settings, self._replica, each, costs, batch) for each in (guessed, drawn)
        )
        return drawn if theirs > ours else guessed

    def _by_model(self, seat: Seat) -> Candidate | None:
        """What the draft model could do for a sequence; None if nothing."""
        speculation, model = seat.speculation, seat.speculation.model
        limit = min(seat.limit, self._settings.max_model_drafts)
        if model is None or self._draft_model is None or limit <= 0 or speculation.is_off:
            return None
        if not self._draft_model.can_draft(DraftWish(model, limit, seat.kv)):
            return None
        return Candidate(
            speculation.state,
            limit,
            forced=speculation.forced,
            by_model=True,
            round_ms=self._draft_model.round_ms,
            catch_up_ms=self._draft_model.catch_up_ms(model),
        )

    def made(
        self,
        seats: Sequence[Seat],
        texts: tuple[Draft, ...],
        candidates: Sequence[Candidate],
        decision: Decision,
    ) -> tuple[tuple[Draft, ...], float]:
        """The texts' guesses, or in their place those that the draft model was left to make; and
        the milliseconds that making them took."""
        asked = [
            candidate.by_model and count > 0
            for candidate, count in zip(candidates, decision.drafts, strict=True)
        ]
        if not any(asked) or self._draft_model is None:
            return texts, 0.0
        began_s = self._clock.monotonic_s()
        rates = self._replica.hazards.confidence.rates()
        wishes = [
            DraftWish(
                model,
                count,
                seat.kv,
                Stopping(most, decision.least_chance, rates) if most else None,
            )
            for seat, count, most, is_asked in zip(
                seats, decision.drafts, decision.most, asked, strict=True
            )
            if is_asked and (model := seat.speculation.model) is not None
        ]
        try:
            made = iter(self._draft_model.draft(wishes))
        except Exception:  # out of memory and kernel errors come as any type
            log.exception("the draft model failed and is not asked again")
            self._draft_model = None
            made = iter([NO_DRAFT] * len(wishes))
        guesses = tuple(
            next(made) if is_asked else text for text, is_asked in zip(texts, asked, strict=True)
        )
        return guesses, (self._clock.monotonic_s() - began_s) * 1e3
