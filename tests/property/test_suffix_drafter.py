"""SuffixDrafter equals a brute-force search, whatever is appended and whenever it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.speculation.drafters import MIN_MATCH_TOKENS, Draft, SuffixDrafter

MAX_MATCH = 5


@dataclass
class BruteForce:
    """The specification: keep a source that predicts right, else the latest longest match."""

    tokens: list[int] = field(default_factory=list)
    source: int = -1
    asked_at: int = 0

    def match_tokens(self, source: int) -> int:
        length = 0
        while length < min(source, MAX_MATCH) and (
            self.tokens[source - 1 - length] == self.tokens[-1 - length]
        ):
            length += 1
        return length

    def propose(self, count: int) -> Draft:
        end = len(self.tokens)
        kept = self.source + end - self.asked_at
        if self.source < 0 or self.tokens[self.source : kept] != self.tokens[self.asked_at :]:
            # max keeps the first of equals: the latest source.
            kept = max(range(end - 1, 0, -1), key=self.match_tokens, default=-1)
        self.asked_at = end
        length = self.match_tokens(kept) if kept >= 0 else 0
        self.source = kept if length >= MIN_MATCH_TOKENS else -1
        if self.source < 0 or count == 0:
            return Draft()
        known = list(self.tokens)
        for index in range(count):
            known.append(known[kept + index])
        return Draft(tuple(known[end:]), length)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 6)),
        max_size=30,
    )
)
def test_equals_brute_force(rounds: list[tuple[list[int], int]]) -> None:
    drafter, brute = SuffixDrafter(max_candidates=10_000, max_match_tokens=MAX_MATCH), BruteForce()
    for appended, count in rounds:
        drafter.extend(appended)
        brute.tokens.extend(appended)
        assert drafter.propose(count) == brute.propose(count)


@given(st.lists(st.integers(0, 3), max_size=300), st.integers(1, 40))
def test_a_draft_is_always_a_continuation_that_was_seen(tokens: list[int], window: int) -> None:
    drafter = SuffixDrafter(window_tokens=window, max_candidates=4)
    for index, token in enumerate(tokens):
        drafter.extend([token])
        draft = drafter.propose(3)
        seen = tokens[: index + 1]
        if not draft.token_ids:
            continue
        match = seen[-draft.match_tokens :]
        assert any(
            seen[at : at + draft.match_tokens] == match
            and seen[at + draft.match_tokens] == draft.token_ids[0]
            for at in range(len(seen) - draft.match_tokens)
        )
