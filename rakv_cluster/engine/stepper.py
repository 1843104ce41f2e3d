"""Computing a step: pack, forward, choose, and measure what it cost."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice

import torch

from rakv_cluster.clock import Clock
from rakv_cluster.engine.packing import Part, StepPacker
from rakv_cluster.kv.buffer import BufferPool
from rakv_cluster.model.sampling import Choice, RuleRow, choose
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.reuse.costs import Costs
from rakv_cluster.speculation.verification import block_rows

_CALIBRATION_ROWS = (1, 64, 256)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward gave: the choices of each part, in order, and how long it all took."""

    choices: tuple[tuple[Choice, ...], ...]
    ms: float


class Stepper:
    """The runner, the sampler and the cost estimates around them. Changes no sequence's state
    but the time of its first forward."""

    def __init__(
        self, runner: Runner, costs: Costs, clock: Clock, *, max_step_tokens: int, eps: float
    ) -> None:
        self._runner = runner
        self._costs = costs
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._eps = eps
        self._packer = StepPacker(max_step_tokens, runner.context_tokens)

    def compute(self, parts: Many[Part]) -> Computed:
        """One forward; choices for each part that reaches its sequence's last known token.

        Raises whatever the model raises (out of memory, for one); slots behind the verified
        lengths may have been written then, which the next attempt overwrites.
        """
        began_s = self._clock.monotonic_s()
        for part in parts:
            if part.sequence.first_forward_s < 0:
                part.sequence.first_forward_s = began_s
        logits = self._runner.forward(self._packer.pack(parts))
        rows = [row for part in parts for row in _rule_rows(part)]
        choices = iter(choose(logits, rows, eps=self._eps) if rows else ())
        by_part = tuple(tuple(islice(choices, part.choices)) for part in parts)
        ms = self._elapsed_ms(began_s)
        self._observe(parts, ms)
        return Computed(by_part, ms)

    def calibrate(self, pool: BufferPool) -> None:
        """Run a few forwards on scratch memory, each twice, and learn the second's cost."""
        longest = min(max(_CALIBRATION_ROWS), self._max_step_tokens, self._runner.context_tokens)
        if not pool.can_lease(longest):
            return
        buffer = pool.lease(longest)
        try:
            for rows in _CALIBRATION_ROWS:
                size = min(rows, longest)
                span = Span(buffer, 0, size, 0, size - 1)
                self._time(span)  # the first of its kind sets up kernels and memory
                self._learn(size, self._time(span))
        finally:
            pool.release(buffer)

    def _observe(self, parts: Many[Part], ms: float) -> None:
        """Drafting steps are no one-token steps: what they cost is the speculator's business. And
        scattered positions do not stand for contiguous ones."""
        if any(part.drafts or part.scattered for part in parts):
            return
        singles = sum(1 for part in parts if part.tokens == 1)
        prompts = [(part.sequence.length, part.tokens) for part in parts if part.tokens > 1]
        if not prompts:
            self._costs.observe_decode(singles, ms)
            return
        if singles:
            ms -= self._costs.view(self._clock.monotonic_s()).decode_ms(singles)
        rows = sum(tokens for _, tokens in prompts)
        self._costs.observe_prefill(max(start for start, _ in prompts), rows, max(ms, 0.0))

    def _time(self, span: Span) -> float:
        """Milliseconds of a forward over ``span`` alone."""
        rows = span.row_stop - span.row_start
        step = Step(
            token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.arange(rows, dtype=torch.int64),
            spans=(span,),
            logit_rows=torch.tensor([rows - 1]),
        )
        began_s = self._clock.monotonic_s()
        self._runner.forward(step)
        return self._elapsed_ms(began_s)

    def _elapsed_ms(self, began_s: float) -> float:
        """Since then until the model is done: on a GPU a forward has only queued its kernels, and
        without a choice nobody has waited for them."""
        if self._runner.device.type == "cuda":
            torch.cuda.current_stream(self._runner.device).synchronize()
        return (self._clock.monotonic_s() - began_s) * 1e3

    def _learn(self, rows: int, ms: float) -> None:
        if rows == 1:
            self._costs.observe_decode(1, ms)
        else:
            self._costs.observe_prefill(0, rows, ms)


def _rule_rows(part: Part) -> list[RuleRow]:
    """The rule's view of each row that chooses: drafts in front of a row count as emitted."""
    if not part.choices:
        return []
    sequence, request = part.sequence, part.sequence.request
    rows = block_rows(
        part.drafts,
        output_tokens=sequence.output_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
    )
    return [
        RuleRow(
            rule=sequence.rule,
            position=sequence.prompt_tokens + row.output_index,
            pending=row.pending,
            banned=row.banned,
            top_logprobs=request.top_logprobs,
        )
        for row in rows
    ]
