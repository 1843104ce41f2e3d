"""Computing a step: pack, forward, choose, and measure what it cost."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from rakv_cluster.clock import Clock
from rakv_cluster.engine.packing import StepPacker
from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.kv.buffer import BufferPool
from rakv_cluster.model.sampling import Choice, RuleRow, choose
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.reuse.costs import Costs

_CALIBRATION_ROWS = (1, 1, 16, 64, 64, 256)
_NO_STOPS: frozenset[int] = frozenset()

Part = tuple[Sequence, int]
"""A sequence and how many of its next tokens a step computes."""


class Stepper:
    """The runner, the sampler and the cost estimates around them. Changes no sequence's state
    but the time of its first forward."""

    def __init__(self, runner: Runner, costs: Costs, clock: Clock, *, max_step_tokens: int) -> None:
        self._runner = runner
        self._costs = costs
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._packer = StepPacker(max_step_tokens, runner.context_tokens)

    def compute(self, parts: Many[Part]) -> list[Choice]:
        """One forward; a choice for each part that reaches its sequence's last known token.

        Raises whatever the model raises (out of memory, for one); slots behind the verified
        lengths may have been written then, which the next attempt overwrites.
        """
        began_s = self._clock.monotonic_s()
        for sequence, _ in parts:
            if sequence.first_forward_s < 0:
                sequence.first_forward_s = began_s
        logits = self._runner.forward(self._packer.pack(parts))
        rows = [
            RuleRow(
                rule=sequence.rule,
                position=sequence.count,
                banned=_banned(sequence),
                top_logprobs=sequence.request.top_logprobs,
            )
            for sequence, tokens in parts
            if tokens == sequence.remaining
        ]
        choices = choose(logits, rows) if rows else []
        self._observe(parts, (self._clock.monotonic_s() - began_s) * 1e3)
        return choices

    def calibrate(self, pool: BufferPool) -> None:
        """Run a few forwards of sequence-less rows on scratch memory and learn their costs."""
        longest = min(max(_CALIBRATION_ROWS), self._max_step_tokens, self._runner.context_tokens)
        if not pool.can_lease(longest):
            return
        buffer = pool.lease(longest)
        try:
            for rows in _CALIBRATION_ROWS:
                size = min(rows, longest)
                self._time(Span(buffer, 0, size, 0, size - 1))
        finally:
            pool.release(buffer)

    def _observe(self, parts: Many[Part], ms: float) -> None:
        singles = sum(1 for _, tokens in parts if tokens == 1)
        prompts = [(sequence.length, tokens) for sequence, tokens in parts if tokens > 1]
        if not prompts:
            self._costs.observe_decode(singles, ms)
            return
        if singles:
            ms -= self._costs.view(self._clock.monotonic_s()).decode_ms(singles)
        rows = sum(tokens for _, tokens in prompts)
        self._costs.observe_prefill(max(start for start, _ in prompts), rows, max(ms, 0.0))

    def _time(self, span: Span) -> None:
        rows = span.row_stop - span.row_start
        step = Step(
            token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.arange(rows, dtype=torch.int64),
            spans=(span,),
            logit_rows=torch.tensor([rows - 1]),
        )
        began_s = self._clock.monotonic_s()
        self._runner.forward(step)
        ms = (self._clock.monotonic_s() - began_s) * 1e3
        if rows == 1:
            self._costs.observe_decode(1, ms)
        else:
            self._costs.observe_prefill(0, rows, ms)


def _banned(sequence: Sequence) -> frozenset[int]:
    request = sequence.request
    return request.stop_token_ids if sequence.output_tokens < request.min_tokens else _NO_STOPS
