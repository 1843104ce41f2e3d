"""Which tokens of a verified block count. One rule, whatever K is.

A block's rows are the last emitted token followed by K drafts; row ``j``'s logits choose the
token that stands ``j`` places behind it. The choice at row ``j`` is the one plain decoding would
make there if and only if drafts ``0..j-1`` equal the choices of rows ``0..j-1``: so the drafts
are walked in order, and everything behind the first that differs is dropped. No draft
distribution is needed, also when sampling, because a choice is a function of (logits, request,
seed, position) alone (DESIGN.md section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rakv_cluster.types import FinishReason

NOTHING_BANNED: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockRow:
    """What the token rule must know about one row besides its logits.

    ``output_index`` counts output tokens from 0; ``pending`` are the drafts in front of the row,
    which penalties see as if they had been emitted; ``banned`` ids cannot be chosen.
    """

    output_index: int
    pending: tuple[int, ...]
    banned: frozenset[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a block came to.

    The first ``emitted`` choices are output tokens (0 if the very first ended the request).
    ``accepted`` drafts equal their choice, also where the request ended before them; they are
    what the drafter is judged by. The first ``verified_rows`` rows have written KV of tokens that
    are part of the sequence: the buffer's length grows by that many. ``finish`` is None while the
    request goes on; ``stop_token_id`` is the token that ended it (-1 if none did).
    """

    emitted: int
    accepted: int
    verified_rows: int
    finish: FinishReason | None = None
    stop_token_id: int = -1

    @property
    def plain_steps(self) -> int:
        """One-token steps that the block stands for; choosing a stop token takes one too."""
        return self.emitted + (self.finish is FinishReason.STOP)


def draft_limit(*, tokens_left: int, free_slots: int) -> int:
    """Most drafts that a step can use.

    ``tokens_left`` may still be emitted (the row behind the last draft emits one as well);
    ``free_slots`` of KV are left, one of which the last emitted token takes.
    """
    return max(0, min(tokens_left, free_slots) - 1)


def block_rows(
    drafts: Sequence[int],
    *,
    output_tokens: int,
    min_tokens: int,
    stop_token_ids: frozenset[int],
) -> tuple[BlockRow, ...]:
    """The K+1 rows of a block behind ``output_tokens`` emitted tokens."""
    return tuple(
        BlockRow(
            output_index=output_tokens + row,
            pending=tuple(drafts[:row]),
            banned=stop_token_ids if output_tokens + row < min_tokens else NOTHING_BANNED,
        )
        for row in range(len(drafts) + 1)
    )


def judge_block(
    drafts: Sequence[int],
    chosen_ids: Sequence[int],
    *,
    tokens_left: int,
    stop_token_ids: frozenset[int],
) -> Verdict:
    """Accept drafts up to the first that differs from its row's choice.

    Raises ``ValueError`` unless there is one choice more than drafts and ``tokens_left`` > 0.
    """
    if len(chosen_ids) != len(drafts) + 1 or tokens_left < 1:
        raise ValueError(
            f"{len(drafts)} drafts, {len(chosen_ids)} choices, {tokens_left} tokens left"
        )
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen_ids[accepted]:
        accepted += 1
    for index in range(min(accepted + 1, tokens_left)):
        if chosen_ids[index] in stop_token_ids:
            # The stop token is no output; were it a draft, its KV is left behind the length.
            return Verdict(index, accepted, index + 1, FinishReason.STOP, chosen_ids[index])
    if accepted + 1 >= tokens_left:
        rows = 1 + min(accepted, tokens_left)
        return Verdict(tokens_left, accepted, rows, FinishReason.LENGTH)
    return Verdict(accepted + 1, accepted, accepted + 1)
