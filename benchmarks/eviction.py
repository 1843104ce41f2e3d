"""Eviction policies on real traces, by hit rate and by recompute time saved, against Belady.

Replays requests through the store's own catalog and policies. A request hits the longest stored
prefix of its chunks (KV behind a missing chunk is of no use), then stores what was missing. Cost
of a chunk: the measured CPU prefill of SmolLM2-135M, 765 ms for 256 tokens at position 0 and
1,001 ms at 768 (research/store.md, 2.3), linear in between.

Traces: Mooncake's conversation trace as recorded, 512-token blocks; the mini-SWE agent trace cut by
this project's chunker over a stand-in tokenization, as recorded (sessions one after another, so
all policies are alike) and with eight sessions at a time. Without the shared data: questions about
documents of Zipf popularity.
"""

from __future__ import annotations

import heapq
import json
import re
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import Options, Requirement, finish, parse_options, shared_data, table
from rakv_cluster.chunking.boundaries import BLANK_LINE, PARAGRAPH_END, ChunkLimits, CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.store.catalog import Catalog
from rakv_cluster.store.eviction import POLICIES, Entry, PolicyFactory
from rakv_cluster.testing.traces import DocumentLoad, document_questions

CAPACITIES = (0.02, 0.05, 0.10, 0.20, 0.30)
BLOCK_TOKENS = 512
NAMESPACE = bytes(32)
DEFAULT = "arc"
AGENTS_AT_ONCE = 8
_MS_PER_TOKEN = 2.84
_MS_PER_TOKEN_AND_POSITION = 0.0012
_NEWLINE, _NEWLINES = 1 << 16, (1 << 16) + 1
_WORD = re.compile(r"\n+|[^\S\n]*\w{1,6}|[^\S\n]*[^\w\s]|[^\S\n]+")


@dataclass(frozen=True, slots=True)
class Block:
    """A chunk of a request; its size is counted in tokens."""

    key: bytes
    start: int
    tokens: int

    @property
    def cost_ms(self) -> float:
        """Time to compute its KV behind its prefix."""
        middle = self.start + self.tokens / 2
        return self.tokens * (_MS_PER_TOKEN + _MS_PER_TOKEN_AND_POSITION * middle)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt's blocks at a time."""

    time_s: float
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Share of blocks found and share of prefill time saved."""

    hits: float
    saved: float


def mooncake(path: Path, limit: int) -> list[Request]:
    """The conversation trace; block ids are chained prefix hashes already."""
    requests = []
    with path.open() as lines:
        for _, line in zip(range(limit), lines, strict=False):
            row = json.loads(line)
            blocks = tuple(
                Block(number.to_bytes(4, "little"), index * BLOCK_TOKENS, BLOCK_TOKENS)
                for index, number in enumerate(row["hash_ids"])
            )
            requests.append(Request(row["timestamp"] / 1000, blocks))
    return requests


def agent_sessions(folder: Path) -> list[list[Request]]:
    """Coding-agent sessions: full prompts, cut by the project's chunker."""
    classes = np.zeros(1 << 17, dtype=np.uint8)
    classes[_NEWLINE], classes[_NEWLINES] = BLANK_LINE, PARAGRAPH_END
    cuts, limits = CutTable(classes), ChunkLimits()
    sessions = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        requests = []
        for row in sorted(rows, key=lambda row: row["timestamp"]):
            prompt = chunk_prompt(NAMESPACE, [_stand_in_ids(row["input"])], cuts, limits)
            blocks = tuple(
                Block(chunk.prefix_key, chunk.start, len(chunk.token_ids))
                for chunk in prompt.chunks
            )
            requests.append(Request(row["timestamp"] / 1e6, blocks))
        sessions.append(requests)
    return sessions


def _stand_in_ids(text: str) -> list[int]:
    """Token ids of a tokenizer-sized alphabet; newlines keep their meaning for the chunker."""
    return [
        (_NEWLINE if word == "\n" else _NEWLINES)
        if word[0] == "\n"
        else zlib.crc32(word.encode()) & 0xFFFF
        for word in _WORD.findall(text)
    ]


def documents(load: DocumentLoad, seed: int) -> list[Request]:
    """A made trace: questions about documents."""
    return [
        Request(
            request.at_ms / 1e3,
            tuple(
                Block(key, index * load.chunk_tokens, load.chunk_tokens)
                for index, key in enumerate(request.keys)
            ),
        )
        for request in document_questions(load, seed)
    ]


def one_after_another(sessions: Sequence[Sequence[Request]]) -> list[Request]:
    """The sessions as recorded."""
    return sorted((r for session in sessions for r in session), key=lambda r: r.time_s)


def at_once(sessions: Sequence[Sequence[Request]], lanes: int) -> list[Request]:
    """Several agents, each starting its next session when one ends, with the recorded pauses."""
    free_at = [0.0] * lanes
    requests = []
    for session in sorted(sessions, key=lambda session: session[0].time_s):
        lane = free_at.index(min(free_at))
        shift = free_at[lane] - session[0].time_s
        requests += [Request(request.time_s + shift, request.blocks) for request in session]
        free_at[lane] = requests[-1].time_s
    return sorted(requests, key=lambda request: request.time_s)


def replay(trace: Sequence[Request], policy: PolicyFactory, budget: int) -> Outcome:
    """Run a trace through a catalog of ``budget`` tokens."""
    catalog = Catalog(budget, policy)
    tally = _Tally()
    for request in trace:
        found = 0
        while found < len(request.blocks) and request.blocks[found].key in catalog:
            found += 1
        tally.count(request.blocks, found)
        here = {block.key for block in request.blocks}
        # Blocks behind the first missing one were of no use, but now they are again.
        catalog.touch([key for key in here if key in catalog], request.time_s)
        _store(catalog, request, here)
    return tally.outcome()


def _store(catalog: Catalog, request: Request, here: set[bytes]) -> None:
    missing = [block for block in request.blocks if block.key not in catalog]
    room = catalog.budget_bytes - sum(catalog[key].size_bytes for key in here if key in catalog)
    while missing and sum(block.tokens for block in missing) > room:
        missing.pop()
    total = sum(block.tokens for block in missing)
    for key in catalog.victims({NAMESPACE: total}, spare=here):
        catalog.remove(key, evicted=True)
    for block in reversed(missing):
        entry = Entry(
            NAMESPACE, block.tokens, block.tokens, block.start, block.cost_ms,
            request.time_s, request.time_s,
        )  # fmt: skip
        catalog.add(block.key, entry)


def belady(trace: Sequence[Request], budget: int) -> Outcome:
    """Evict what is needed last, knowing the future; near the optimum for chained blocks."""
    uses: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for index, request in enumerate(trace):
        for block in request.blocks:
            uses[block.key].append(index)
    never = len(trace)
    held: dict[bytes, tuple[int, int]] = {}  # size, next use
    farthest: list[tuple[int, int, bytes]] = []
    used = 0
    tally = _Tally()
    for request in trace:
        found = 0
        while found < len(request.blocks) and request.blocks[found].key in held:
            found += 1
        tally.count(request.blocks, found)
        for block in request.blocks:
            uses[block.key].popleft()
            next_use = uses[block.key][0] if uses[block.key] else never
            if block.key in held:
                used -= held.pop(block.key)[0]
            if next_use == never:
                continue
            while used + block.tokens > budget and farthest and -farthest[0][0] > next_use:
                when, _, key = heapq.heappop(farthest)
                if key in held and held[key][1] == -when:
                    used -= held.pop(key)[0]
            if used + block.tokens <= budget:
                held[block.key] = (block.tokens, next_use)
                heapq.heappush(farthest, (-next_use, -block.start, block.key))
                used += block.tokens
    return tally.outcome()


class _Tally:
    def __init__(self) -> None:
        self._blocks = self._hits = 0
        self._cost_ms = self._saved_ms = 0.0

    def count(self, blocks: Sequence[Block], found: int) -> None:
        self._blocks += len(blocks)
        self._hits += found
        self._cost_ms += sum(block.cost_ms for block in blocks)
        self._saved_ms += sum(block.cost_ms for block in blocks[:found])

    def outcome(self) -> Outcome:
        return Outcome(self._hits / self._blocks, self._saved_ms / self._cost_ms)


def compare(traces: dict[str, list[Request]]) -> dict[str, dict[str, list[Outcome]]]:
    """Outcomes by trace and policy, one per capacity."""
    results: dict[str, dict[str, list[Outcome]]] = {}
    for name, trace in traces.items():
        sizes = {block.key: block.tokens for request in trace for block in request.blocks}
        budgets = [int(sum(sizes.values()) * share) for share in CAPACITIES]
        runs: dict[str, Callable[[int], Outcome]] = {
            policy: partial(replay, trace, factory) for policy, factory in POLICIES.items()
        }
        runs["belady"] = partial(belady, trace)
        results[name] = {policy: [run(b) for b in budgets] for policy, run in runs.items()}
        print_trace(name, results[name])
    return results


def print_trace(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    """Hit rate / time saved in percent, by capacity."""
    rows = [
        [policy, *(f"{100 * o.hits:.1f}/{100 * o.saved:.1f}" for o in row)]
        for policy, row in outcomes.items()
    ]
    headings = [name, *(f"{share:.0%}" for share in CAPACITIES)]
    print(table(rows, headings), end="\n\n")


def load_traces(options: Options) -> dict[str, list[Request]]:
    """All traces, the first one shortened if so asked; without the recorded ones, a made one."""
    folder = shared_data() / "traces"
    if not folder.exists():
        load = DocumentLoad(rate_per_s=1.0, requests=500 if options.short else 4000)
        return {"documents of Zipf popularity": documents(load, options.seed)}
    sessions = agent_sessions(folder / "agent_miniswe")
    limit = 2500 if options.short else 1_000_000
    return {
        "conversation": mooncake(folder / "mooncake_conversation.jsonl", limit),
        "agent": one_after_another(sessions),
        f"agent x{AGENTS_AT_ONCE}": at_once(sessions, AGENTS_AT_ONCE),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and report."""
    options, _ = parse_options(__doc__ or "", argv)
    results = compare(load_traces(options))
    means = {
        policy: float(
            np.mean([(o.hits, o.saved) for trace in results.values() for o in trace[policy]])
        )
        for policy in [*POLICIES, "belady"]
    }
    print(table([[policy, 100 * mean] for policy, mean in means.items()], ["mean", "%"]))
    requirements = [
        Requirement(
            f"mean of {DEFAULT} over that of {other}", means[DEFAULT] / means[other], ">=", 1
        )
        for other in POLICIES
        if other != DEFAULT
    ]
    plain = {
        trace: {
            policy: [{"hits": o.hits, "saved": o.saved} for o in row]
            for policy, row in outcomes.items()
        }
        for trace, outcomes in results.items()
    }
    report = {"capacities": CAPACITIES, "traces": plain, "means": means}
    return finish(options, report, requirements)


if __name__ == "__main__":
    sys.exit(main())
