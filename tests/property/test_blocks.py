"""Decoding in blocks of any size emits what decoding one by one emits."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.speculation.verification import block_rows, draft_limit, judge_block
from rakv_cluster.types import FinishReason

STOP = frozenset({0})


def choose(history: tuple[int, ...], banned: frozenset[int], salt: int) -> int:
    """A stand-in for the token rule: any function of what was emitted, and of the bans."""
    token = hash((salt, history[-3:], history.count(1))) % 7
    return token + 1 if token in banned else token


def decode(
    block_sizes: list[int], right: list[bool], salt: int, max_tokens: int, min_tokens: int
) -> tuple[tuple[int, ...], FinishReason, int, int]:
    """Emitted tokens, why it ended, stop token, KV length, with drafts right as scripted."""
    emitted: tuple[int, ...] = ()
    sizes, rights = itertools.cycle(block_sizes), itertools.cycle(right)
    kv_length = 0
    while True:
        limit = draft_limit(tokens_left=max_tokens - len(emitted), free_slots=1_000)
        drafts: tuple[int, ...] = ()
        for _ in range(min(next(sizes), limit)):
            index = len(emitted) + len(drafts)
            banned = STOP if index < min_tokens else frozenset()
            truth = choose(emitted + drafts, banned, salt)
            drafts += (truth if next(rights) else (truth + 1) % 7,)
        rows = block_rows(
            drafts, output_tokens=len(emitted), min_tokens=min_tokens, stop_token_ids=STOP
        )
        chosen = [choose(emitted + row.pending, row.banned, salt) for row in rows]
        verdict = judge_block(
            drafts, chosen, tokens_left=max_tokens - len(emitted), stop_token_ids=STOP
        )
        emitted += tuple(chosen[: verdict.emitted])
        kv_length += verdict.verified_rows
        if verdict.finish is not None:
            return emitted, verdict.finish, verdict.stop_token_id, kv_length


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.integers(0, 10_000),
    st.integers(1, 30),
    st.integers(0, 30),
)
def test_blocks_equal_single_steps(
    sizes: list[int], right: list[bool], salt: int, max_tokens: int, min_tokens: int
) -> None:
    blocks = decode(sizes, right, salt, max_tokens, min_tokens)
    plain = decode([0], [True], salt, max_tokens, min_tokens)

    assert blocks == plain
