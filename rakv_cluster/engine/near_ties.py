"""Tokens that rounding could decide otherwise are decided as plain decoding decides them.

Where a runner's logits depend on what else stands in a step (see ModelCard.near_tie_eps), a token
chosen beside other rows, or over KV computed beside them, is taken only if its lead is larger than
that. Otherwise it is a near-tie: the request's generated part is computed again in lone one-token
steps, and the last of them decides (DESIGN.md section 4). KV of the prompt stays as it is, so a
first token has nothing to be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from rakv_cluster.engine.packing import Part
from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.kv.buffer import no_positions
from rakv_cluster.model.sampling import Choice
from rakv_cluster.speculation.verification import Verdict


@dataclass(frozen=True, slots=True)
class Decided:
    """What stands of a part's choices; ``replay`` if the token behind them is a near-tie."""

    verdict: Verdict
    replay: bool


NOTHING_DECIDED = Decided(Verdict(0, 0, 1), replay=False)
"""Of a part that reaches no choice."""


def is_lone(parts: Many[Part]) -> bool:
    """Whether a step over ``parts`` is one of plain decoding: one row of one sequence."""
    return len(parts) == 1 and parts[0].rows == 1


def decide(part: Part, choices: Many[Choice], verdict: Verdict, *, lone: bool) -> Decided:
    """``verdict`` up to the first near-tie that a replay could decide otherwise.

    Call before the sequence advances.
    """
    near = next((i for i in range(verdict.plain_steps) if choices[i].near_tie), None)
    if near is None or not _replayable(part.sequence, lone=lone):
        return Decided(verdict, replay=False)
    # The drafts in front of the near-tie were accepted, else it would not be reached.
    return Decided(Verdict(near, max(near - 1, 0), near), replay=True)


def note_lone(sequence: Sequence) -> None:
    """A lone step computed the next row of ``sequence``, which has not advanced over it yet."""
    if sequence.length == _as_plain(sequence):
        sequence.one_by_one += 1


def start_replay(sequence: Sequence) -> None:
    """Take ``sequence`` back to where its KV is no longer that of plain decoding."""
    if sequence.buffer is None:
        raise AssertionError("a running sequence has a buffer")
    sequence.buffer.length = min(sequence.buffer.length, _as_plain(sequence))
    sequence.to_compute = no_positions()  # of the prompt none is left, or nothing was generated
    sequence.replaying = True


def _as_plain(sequence: Sequence) -> int:
    """Position up to which the generated part's KV is as lone steps make it."""
    return sequence.prompt_tokens + sequence.one_by_one


def _replayable(sequence: Sequence, *, lone: bool) -> bool:
    """Whether anything generated was computed otherwise than in lone steps."""
    if not sequence.output_tokens:
        return False
    return not (lone and sequence.length == _as_plain(sequence))
