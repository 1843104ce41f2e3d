"""How likely drafts are accepted: decayed counts by confidence and position, no exploration.

A drafter guesses at every step, used or not, and each guess is scored against the tokens that
follow. A *hazard* is the chance that draft ``j`` is right given that drafts ``0..j-1`` were. It
rises with depth (0.4-0.8 first, then ~0.9: DESIGN.md section 8), so one rate would be wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from rakv_cluster.speculation.arms import ArmCosts
from rakv_cluster.speculation.confidence import Confidence
from rakv_cluster.speculation.decayed import DecayedCounts
from rakv_cluster.speculation.drafters import Draft

MATCH_EDGES = (1, 2, 3, 4, 6, 9, 17, 33)
"""Match lengths where a new bucket begins: none (a draft model's guess) | 1 | 2 | 3 | 4-5 | 6-8 |
9-16 | 17-32 | 33 and more."""

POSITIONS = 6
"""Depths with a hazard of their own; deeper drafts share the last one."""

REQUEST_DECAY = 0.93
REPLICA_DECAY = 0.998
REPLICA_SHRINK_WEIGHT = 8.0
REQUEST_SHRINK_WEIGHT = 16.0
MODEL_SHRINK_WEIGHT = 28.0
"""How many observations count as much as what is known elsewhere: a place's as the one in front of
it or the prior, a request's as all others', a model's first drafts as its agreement."""

PRIOR_FIRST = 0.4
PRIOR_LATER = 0.75
"""Expected of a text's guesses: those behind a right one are right at least so often."""


class LastOutcome(IntEnum):
    """How the first draft of a request's latest scored guess fared."""

    UNKNOWN = 0
    MISS = 1
    HIT = 2


CONTEXTS = (len(MATCH_EDGES) + 1) * len(LastOutcome)
MODEL_CONTEXT = 0


def context_of(match_tokens: int, last: LastOutcome) -> int:
    """Index of the cell row for a guess with this match length behind this outcome.

    A model's guesses (no match) share one row: only those that were paid for are seen, so a row
    for those behind a miss would, after a few misses, never be asked again.
    """
    if match_tokens == 0:
        return MODEL_CONTEXT
    return bisect_right(MATCH_EDGES, match_tokens) * len(LastOutcome) + last


class Hazards:
    """Decayed accepted / tried counts per (context, position)."""

    def __init__(self, decay: float) -> None:
        self._counts = DecayedCounts(CONTEXTS * POSITIONS, decay)
        self._agreement = PRIOR_FIRST

    def record(self, context: int, position: int, accepted: bool) -> None:
        """Count one draft that was looked at: ``position`` 0 is the first of its guess."""
        self._counts.record(context * POSITIONS + min(position, POSITIONS - 1), accepted)

    def assume(self, agreement: float) -> None:
        """Expect a model's drafts to be right so often, until they are seen."""
        self._agreement = agreement

    def by_position(self) -> tuple[float, ...]:
        """Acceptance at each position over all contexts, unshrunk; 0 where nothing was tried."""
        rates = []
        for position in range(POSITIONS):
            tried = sum(self._counts.tried[position::POSITIONS])
            accepted = sum(self._counts.accepted[position::POSITIONS])
            rates.append(accepted / tried if tried else 0.0)
        return tuple(rates)

    def rates(self, context: int, count: int) -> list[float]:
        """Acceptance at the first ``count`` positions, at most :data:`POSITIONS`.

        Each is shrunk towards the one in front of it: a depth that was never drafted would
        otherwise keep its prior for ever, and so never be drafted.
        """
        rate, weight, least = PRIOR_FIRST, REPLICA_SHRINK_WEIGHT, PRIOR_LATER
        if context == MODEL_CONTEXT:
            rate, weight, least = self._agreement, MODEL_SHRINK_WEIGHT, 0.0
        rates = []
        for cell in range(context * POSITIONS, context * POSITIONS + count):
            rate = self._counts.shrunk(cell, rate, weight)
            rates.append(rate)
            rate, weight = max(rate, least), REPLICA_SHRINK_WEIGHT
        return rates

    def narrowed(self, context: int, rates: Sequence[float]) -> list[float]:
        """``rates`` of all requests, as far as this one's own counts bear them out."""
        first = context * POSITIONS
        return [
            self._counts.shrunk(first + position, rate, REQUEST_SHRINK_WEIGHT)
            for position, rate in enumerate(rates)
        ]


class ReplicaHazards(Hazards):
    """Those of all requests of a replica, and what a model's ``confidence`` is worth."""

    def __init__(self) -> None:
        super().__init__(REPLICA_DECAY)
        self.confidence = Confidence()


def survivals(request: Hazards, replica: Hazards, context: int, count: int) -> list[float]:
    """For each of ``count`` drafts, the chance that it and all in front of it are accepted."""
    rates = request.narrowed(context, replica.rates(context, min(count, POSITIONS)))
    alive, chances = 1.0, []
    for position in range(count):
        alive *= rates[min(position, POSITIONS - 1)]
        chances.append(alive)
    return chances


@dataclass(slots=True)
class Trial:
    """A guess and how far the tokens that followed have borne it out; one that is only ``watched``
    was no choice between numbers of drafts."""

    context: int
    guess: Draft
    costs: ArmCosts
    matched: int = 0
    watched: bool = False


@dataclass(frozen=True, slots=True)
class ScoredTrial:
    """A guess whose fate is known: ``accepted`` of its tokens came, then another or none left."""

    accepted: int
    costs: ArmCosts


class AcceptanceTracker:
    """One request's hazards, and the guesses still being scored.

    Only decision points are scored. At K=0 a token that was guessed right would not have been a
    decision point had it been drafted, so no trial is opened on it: scoring every position
    over-estimates, because easy positions sit inside accepted runs. Every step emits a token, so
    no more trials are open at once than two guesses have tokens.
    """

    def __init__(self, replica: ReplicaHazards) -> None:
        self.hazards = Hazards(REQUEST_DECAY)
        self._replica = replica
        self._trials: list[Trial] = []
        self._last = LastOutcome.UNKNOWN
        self._skip_next = False

    def context(self, match_tokens: int) -> int:
        """Cell row for a guess made now."""
        return context_of(match_tokens, self._last)

    def survivals(self, match_tokens: int, count: int) -> list[float]:
        """For each of ``count`` drafts of a guess made now, its chance of being accepted."""
        return survivals(self.hazards, self._replica, self.context(match_tokens), count)

    def open(self, guess: Draft, costs: ArmCosts) -> None:
        """A step had ``costs.chosen`` of the tokens of ``guess`` checked."""
        if guess.token_ids and not (self._skip_next and costs.chosen == 0):
            self._trials.append(Trial(self.context(guess.match_tokens), guess, costs))
        self._skip_next = False

    def pass_by(self) -> None:
        """A step guessed nothing."""
        self._skip_next = False

    def watch(self, guess: Draft, costs: ArmCosts) -> None:
        """A step guessed this and checked others in its place: call before :meth:`open`."""
        if guess.token_ids:
            context = self.context(guess.match_tokens)
            self._trials.append(Trial(context, guess, costs, watched=True))

    def follow(self, tokens: Sequence[int]) -> list[ScoredTrial]:
        """The sequence grew by these tokens; returns the trials of choices that this settles."""
        if tokens and self._trials and self._trials[-1].matched == 0:
            fresh = self._trials[-1]
            right = fresh.guess.token_ids[0] == tokens[0]
            self._last = LastOutcome.HIT if right else LastOutcome.MISS
            self._skip_next = right and fresh.costs.chosen == 0 and len(tokens) == 1
        return self._score(tokens)

    def _score(self, tokens: Sequence[int]) -> list[ScoredTrial]:
        settled, alive = [], []
        for trial in self._trials:
            if self._advance(trial, tokens):
                alive.append(trial)
            elif not trial.watched:
                settled.append(ScoredTrial(trial.matched, trial.costs))
        self._trials = alive
        return settled

    def _advance(self, trial: Trial, tokens: Sequence[int]) -> bool:
        """Score a trial against new tokens; returns whether some of it is still open."""
        guess = trial.guess
        for token in tokens:
            right = guess.token_ids[trial.matched] == token
            for table in (self.hazards, self._replica):
                table.record(trial.context, trial.matched, right)
            if guess.confidences:
                self._replica.confidence.record(guess.confidences[trial.matched], right)
            if not right:
                return False
            trial.matched += 1
            if trial.matched == len(guess.token_ids):
                return False
        return True
