"""A replica's speculation against scripted drafters and costs, in virtual time.

Everything that decides is the real code; only the model is replaced, by a cost function and by
scripts that say how many tokens of each guess will turn out right. It shows what the controller
would do on hardware where a step costs this much, and tests hold the governor to its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from rakv_cluster.model.sampling import TokenRule
from rakv_cluster.speculation.controller import ControllerSettings
from rakv_cluster.speculation.cost_model import CostBuckets, CostSample, CostTable
from rakv_cluster.speculation.decision import Reason
from rakv_cluster.speculation.draft_rounds import DraftState, DraftWish, ModelDrafter
from rakv_cluster.speculation.drafters import Draft
from rakv_cluster.speculation.seats import Seat, Speculation
from rakv_cluster.speculation.speculator import SpeculationMode, Speculator
from rakv_cluster.speculation.verification import Verdict, draft_limit, judge_block
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.types import SamplingParams

NO_RULE = TokenRule(SamplingParams(), [], vocab_size=1)
"""Scripts choose the tokens here."""

WRONG_TOKEN = -1
"""Never chosen: the right token at output position ``p`` is ``p`` itself. Prompts are of it."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A scripted draft: the model will choose its first ``right`` tokens of ``length``."""

    length: int
    right: int
    match_tokens: int = 8
    draft_ms: float = 0.0


Script = Callable[[int], Guess]
"""Output position -> what the drafter guesses there."""


class ScriptedDrafter:
    """Plays a script; guessing moves the clock by the script's ``draft_ms``."""

    def __init__(self, script: Script, clock: ManualClock) -> None:
        self._script = script
        self._clock = clock
        self._position = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self._position += len(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        guess, start = self._script(self._position), self._position
        self._clock.advance(guess.draft_ms / 1e3)
        length = min(guess.length, max_tokens)
        ids = tuple(start + i if i < guess.right else WRONG_TOKEN for i in range(length))
        return Draft(ids, guess.match_tokens if ids else 0)


class ScriptedModel:
    """A model that drafts, right at the output positions for which ``is_right``; behind its first
    mistake it is always wrong. Every draft moves the clock by ``round_ms``. With ``confidence`` by
    output position it ends its drafts where it is told to."""

    def __init__(
        self,
        is_right: Callable[[int], bool],
        clock: ManualClock,
        *,
        round_ms: float,
        agreement: float = 0.8,
        confidence: Callable[[int], float] | None = None,
    ) -> None:
        self._confidence = confidence
        self.agreement = agreement
        self.round_ms = round_ms
        self._is_right = is_right
        self._clock = clock

    def catch_up_ms(self, state: DraftState) -> float:
        return 0.0

    def can_draft(self, wish: DraftWish) -> bool:
        return True

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        made = [self._draft(wish) for wish in wishes]
        self._clock.advance(max(len(draft.token_ids) for draft in made) * self.round_ms / 1e3)
        return made

    def _draft(self, wish: DraftWish) -> Draft:
        start = wish.state.ids[-1] + 1
        if self._confidence is None or wish.stopping is None:
            return Draft(self._drafts(start, wish.drafts))
        confidences = [self._confidence(start)]
        while not wish.stopping.ends(confidences):
            confidences.append(self._confidence(start + len(confidences)))
        tokens = self._drafts(start, len(confidences))
        return Draft(tokens, confidences=tuple(confidences))

    def _drafts(self, start: int, count: int) -> tuple[int, ...]:
        right = sum(1 for _ in takewhile(self._is_right, range(start, start + count)))
        return (*range(start, start + right), *[WRONG_TOKEN] * (count - right))

    def close(self, state: DraftState) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step as it really went; ``plain_ms`` is the true cost of its K=0 step."""

    reason: Reason
    ms: float
    plain_ms: float
    emitted: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens emitted over all requests."""
        return sum(self.emitted)

    @property
    def plain_time_ms(self) -> float:
        """True time of plain decoding for the same tokens."""
        return self.plain_ms * self.tokens / len(self.emitted)


@dataclass(slots=True)
class _Running:
    speculation: Speculation
    prompt_tokens: int
    tokens_left: int
    position: int = 0

    @property
    def ids(self) -> np.ndarray:
        """Prompt and output so far."""
        return np.append(np.full(self.prompt_tokens, WRONG_TOKEN), np.arange(self.position))


StepTime = Callable[[int, int], float]
"""(rows, batch) -> true milliseconds of a step without context."""


@dataclass(slots=True)
class SimulatedReplica:
    """One replica; what it learned carries over from one :meth:`run` to the next.

    A step takes ``step_ms`` and ``context_ms`` more per token of its sequences' mean context.
    """

    step_ms: StepTime
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    buckets: CostBuckets = field(default_factory=CostBuckets)
    clock: ManualClock = field(default_factory=ManualClock)
    context_ms: float = 0.0
    draft_model: ModelDrafter | None = None
    speculator: Speculator = field(init=False)

    def __post_init__(self) -> None:
        self.speculator = Speculator(
            CostTable(self.buckets), self.settings, self.clock, draft_model=self.draft_model
        )

    def seed_costs(self, batch: int = 1, contexts: Sequence[int] = (1,)) -> None:
        """Measure every rows bucket once at each context, as the self-benchmark does."""
        for context in contexts:
            for rows in self.buckets.rows:
                if rows >= batch:
                    ms = self._true_ms(rows, batch, context)
                    self.speculator.table.observe(CostSample(rows, context, batch, ms))

    def _true_ms(self, rows: int, batch: int, context_tokens: float) -> float:
        return self.step_ms(rows, batch) + self.context_ms * context_tokens

    def run(
        self,
        scripts: Sequence[Script],
        *,
        output_tokens: int,
        prompt_tokens: int = 0,
        prefill_ms: float = 0.0,
        mode: SpeculationMode = "auto",
    ) -> list[SimulatedStep]:
        """Serve one request per script, all at once, each of ``output_tokens`` tokens."""
        running = [
            self._begin(script, prompt_tokens, output_tokens, prefill_ms, mode)
            for script in scripts
        ]
        steps = []
        while running:
            steps.append(self._step(running))
            for request in running:
                if not request.tokens_left:
                    self.speculator.finish(request.speculation, request.ids)
            running = [request for request in running if request.tokens_left]
        return steps

    def _begin(
        self,
        script: Script,
        prompt_tokens: int,
        output_tokens: int,
        prefill_ms: float,
        mode: SpeculationMode,
    ) -> _Running:
        prompt = np.full(prompt_tokens, WRONG_TOKEN)
        speculation = self.speculator.begin(
            mode, prompt, NO_RULE, prefill_ms=prefill_ms, tokens_left=output_tokens
        )
        speculation.drafter = ScriptedDrafter(script, self.clock)
        return _Running(speculation, prompt_tokens, output_tokens)

    def _step(self, running: Sequence[_Running]) -> SimulatedStep:
        batch = len(running)
        seats = [
            Seat(
                request.speculation,
                request.ids,
                draft_limit(tokens_left=request.tokens_left, free_slots=request.tokens_left),
            )
            for request in running
        ]
        if self.speculator.rests(seats):
            return self._plain_step(running)
        plan = self.speculator.plan(seats)
        rows = batch + sum(len(drafts) for drafts in plan.drafts)
        context = _mean_context(running)
        plain_ms = self._true_ms(batch, batch, context)
        forward_ms = self._true_ms(rows, batch, context)
        self.clock.advance(forward_ms / 1e3)
        verdicts = [
            _verify(request, drafts) for request, drafts in zip(running, plan.drafts, strict=True)
        ]
        self.speculator.settle(plan, verdicts, forward_ms=forward_ms)
        return SimulatedStep(
            reason=plan.decision.reason,
            ms=forward_ms + plan.making_ms + plan.control_ms,
            plain_ms=plain_ms,
            emitted=tuple(verdict.emitted for verdict in verdicts),
        )

    def _plain_step(self, running: Sequence[_Running]) -> SimulatedStep:
        batch = len(running)
        plain_ms = self._true_ms(batch, batch, _mean_context(running))
        self.clock.advance(plain_ms / 1e3)
        emitted = tuple(_verify(request, ()).emitted for request in running)
        return SimulatedStep(Reason.RESTED, plain_ms, plain_ms, emitted)


def _mean_context(running: Sequence[_Running]) -> float:
    return sum(each.prompt_tokens + each.position for each in running) / len(running)


def _verify(request: _Running, drafts: Sequence[int]) -> Verdict:
    chosen = range(request.position, request.position + len(drafts) + 1)
    verdict = judge_block(
        drafts, chosen, tokens_left=request.tokens_left, stop_token_ids=frozenset()
    )
    request.position += verdict.emitted
    request.tokens_left -= verdict.emitted
    return verdict
