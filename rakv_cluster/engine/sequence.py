"""One request inside the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats, VerifiedBlocks
from rakv_cluster.engine.scheduler import Candidate, Waiter
from rakv_cluster.engine.text import TextStream
from rakv_cluster.kv.buffer import KvBuffer, Positions, no_positions
from rakv_cluster.model.drift import NO_DRIFT, Drift
from rakv_cluster.model.sampling import TokenRule
from rakv_cluster.model.step import Runner
from rakv_cluster.model.watch import UNWATCHED, AttentionWatch
from rakv_cluster.reuse.assembly import LoadJob
from rakv_cluster.reuse.blender import Blended
from rakv_cluster.reuse.selection import Floats, unknown
from rakv_cluster.speculation.seats import Speculation
from rakv_cluster.types import Chunk, ChunkedPrompt, ReuseMode, Tier

Sink = Callable[[EngineEvent], None]

_EVERYWHERE = 1 << 62


class Phase(Enum):
    """Where a request is. Exactly one at a time; only WAITING and DONE hold no buffer."""

    WAITING = "waiting"
    JOINING = "joining"  # another sequence computes the prefix it wants
    LOADING = "loading"  # a loader thread fills its buffer
    AWAITING = "awaiting"  # another replica computes the prefix it wants
    RUNNING = "running"  # takes part in steps
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request. ``ids[:count]`` are prompt, forced and generated tokens.

    The KV of ``ids[:buffer.length]`` is there. ``to_compute`` are the positions to compute next
    where they are not simply those that follow: a blended prompt has KV behind some of them. From
    position ``exact_until`` on KV is not what this replica would compute: approximate, or behind
    ``other_class_tokens`` that replicas of another numeric class made.

    ``question`` watches the end of a prompt that is computed exactly, to learn what matters in it.

    ``chunked`` covers ``ids`` up to a recent point; its chunks from index ``next_save`` on are not
    offered to the store yet, and those from ``prompt_chunks`` on hold generated tokens.
    ``text`` follows the output where a stop string may end it.
    ``blocks`` counts decode steps by (drafts checked, drafts accepted). The KV of the
    first ``one_by_one`` generated tokens is as lone one-token steps make it; while ``replaying``
    the rest becomes so.

    It may hold leases of ``lease_s`` on the chunks ``claimed``, renewed at ``renew_at_s``, and
    waits for those of others until ``flight_until_s`` (below 0: never had to). Until
    ``background_until_s`` it gives way to others.
    """

    request: EngineRequest
    sink: Sink
    submitted_s: float
    rule: TokenRule
    ids: np.ndarray
    count: int
    chunked: ChunkedPrompt
    arrival: int = -1
    phase: Phase = Phase.WAITING
    buffer: KvBuffer | None = None
    preempted: bool = False
    use_store: bool = True
    donor: Sequence | None = None
    donor_tokens: int = 0
    job: LoadJob | None = None
    to_compute: Positions = field(default_factory=no_positions)
    exact_until: int = _EVERYWHERE
    other_class_tokens: int = 0
    question: AttentionWatch = UNWATCHED
    blended: Blended = field(default_factory=Blended)
    claimed: tuple[Chunk, ...] = ()
    lease_s: float = 0.0
    renew_at_s: float = float("inf")
    flight_until_s: float = -1.0
    waiting_since_s: float = 0.0
    next_save: int = 0
    stored_keys: set[bytes] = field(default_factory=set)
    reused: dict[Tier, int] = field(default_factory=dict)
    admitted_s: float = -1.0
    load_ms: float = 0.0
    first_forward_s: float = -1.0
    first_token_s: float = -1.0
    stats_sent: bool = False
    speculation: Speculation | None = None
    text: TextStream | None = None
    blocks: Counter[tuple[int, int]] = field(default_factory=Counter)
    one_by_one: int = 0
    replaying: bool = False
    background_until_s: float = float("-inf")

    @classmethod
    def create(
        cls,
        request: EngineRequest,
        sink: Sink,
        submitted_s: float,
        runner: Runner,
        background_s: float = 0.0,
    ) -> Sequence:
        """A waiting sequence; forced tokens count as output that is known already.

        One in the background gives way to others for ``background_s``. Its rule decides on logits
        of ``runner``, where these are."""
        prompt_ids = request.prompt.token_ids
        known = len(prompt_ids) + len(request.forced_ids)
        ids = np.empty(len(prompt_ids) + max(request.max_tokens, len(request.forced_ids)), np.int64)
        ids[: len(prompt_ids)] = prompt_ids
        ids[len(prompt_ids) : known] = request.forced_ids
        rule = TokenRule(request.sampling, prompt_ids, runner.vocab_size, runner.device)
        for token_id in request.forced_ids:
            rule.accept(token_id)
        return cls(
            request=request,
            sink=sink,
            submitted_s=submitted_s,
            rule=rule,
            ids=ids,
            count=known,
            chunked=request.prompt,
            use_store=request.reuse is not ReuseMode.OFF,
            background_until_s=submitted_s + background_s if request.background else float("-inf"),
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt.token_ids)

    @property
    def prompt_chunks(self) -> int:
        """Number of complete chunks of the prompt."""
        return len(self.request.prompt.chunks)

    @property
    def blends(self) -> bool:
        """Whether it was asked to reuse equal text computed elsewhere."""
        return self.request.reuse is ReuseMode.BLEND

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, forced ones included."""
        return self.count - self.prompt_tokens

    @property
    def length(self) -> int:
        """Tokens whose KV is verified."""
        return self.buffer.length if self.buffer is not None else 0

    @property
    def exact_length(self) -> int:
        """Leading tokens whose KV is that of plain decoding: what others may have of it.

        A loader may be writing the last of those that are there again."""
        settled = self.length if self.job is None else min(self.length, self.job.untouched)
        return min(settled, self.exact_until)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.to_compute) or self.count - self.length

    @property
    def probing(self) -> bool:
        """Whether a first pass runs, after which prompt positions are computed again."""
        return self.blended.probe.pending

    @property
    def watch(self) -> AttentionWatch:
        """Who is told what the rows of its next step attend to."""
        if self.probing:
            return self.blended.probe.watch
        return self.question if self.first_token_s < 0 else UNWATCHED

    @property
    def drift(self) -> Drift:
        """What of its KV follows the repair that its next step does part of."""
        return self.blended.drift if len(self.to_compute) else NO_DRIFT

    def importance(self, start: int, stop: int) -> Floats:
        """What the prompt's question attended to of ``[start, stop)``; empty if that was not
        watched, or they are part of it."""
        if not self.question.rows or stop > self.question.first_position:
            return unknown(0)
        figures: Floats = self.question.figures(stop).numpy()[start:]
        return figures

    def advance(self, rows: int) -> None:
        """The next ``rows`` positions are computed."""
        if self.buffer is None:
            raise AssertionError("a running sequence has a buffer")
        if not rows:
            return
        if not len(self.to_compute):
            self.buffer.length += rows
            return
        last = int(self.to_compute[rows - 1])
        self.to_compute = self.to_compute[rows:]
        if self.probing and not len(self.to_compute):
            self.blend(self.blended.settled())
            return
        self.buffer.length = int(self.to_compute[0]) if len(self.to_compute) else last + 1

    def blend(self, blended: Blended) -> None:
        """Compute what ``blended`` leaves to compute; everything follows if that is nothing."""
        self.blended = blended
        if len(blended.to_compute) and self.buffer is not None:
            self.to_compute = blended.to_compute
            self.exact_until = min(self.exact_until, blended.first)
            self.buffer.length = int(blended.to_compute[0])

    @property
    def movable(self) -> bool:
        """Whether its memory can be taken: no thread writes to it."""
        return self.phase in (Phase.RUNNING, Phase.JOINING, Phase.AWAITING)

    def gives_way(self, now_s: float) -> bool:
        """Whether others go first: nobody waits for it, and it has not waited long."""
        return now_s < self.background_until_s

    def waiter(self, now_s: float) -> Waiter:
        """What the scheduler sees of it while it waits."""
        yields = self.gives_way(now_s)
        return Waiter(self.arrival, self.request.tenant, self.preempted, yields)

    def candidate(self, now_s: float) -> Candidate:
        """What the scheduler sees of it while it runs."""
        return Candidate(
            arrival=self.arrival,
            tenant=self.request.tenant,
            position=self.length,
            remaining=self.remaining,
            streaming=self.first_token_s >= 0,
            alone=self.replaying,
            background=self.gives_way(now_s),
        )

    @property
    def awaits_other_replica(self) -> bool:
        """Whether another replica computes its prefix, or that of the one it has joined."""
        if self.donor is not None:
            return self.donor.awaits_other_replica
        return self.phase is Phase.AWAITING

    @property
    def lease_limit(self) -> int:
        """Most slots this request can need."""
        return len(self.ids)

    @property
    def deadline_s(self) -> float:
        """When it must have ended, on the engine's clock."""
        return self.submitted_s + self.request.timeout_s

    @property
    def known_ids(self) -> np.ndarray:
        """Prompt, forced and generated tokens: a view."""
        return self.ids[: self.count]

    def take(self, token_ids: Many[int]) -> bool:
        """Take chosen tokens into the output; whether its text has come to a stop string."""
        for token_id in token_ids:
            self.ids[self.count] = token_id
            self.count += 1
            self.rule.accept(token_id)
        return self.text is not None and bool(self.text.push(token_ids).stop)

    def restart_reuse(self) -> None:
        """Forget where prompt tokens came from: they are found or computed again.

        Once the first token is out the account is closed: coming back from preemption is not the
        request's own cost.
        """
        self.to_compute = self.to_compute[:0]
        self.exact_until = _EVERYWHERE
        if self.first_token_s < 0:
            self.reused.clear()
            self.blended = Blended()
            self.other_class_tokens = 0

    def reuse_from(self, tier: Tier, start: int, stop: int) -> None:
        """Account prompt positions ``[start, stop)`` to ``tier``, unless the account is closed."""
        tokens = min(stop, self.prompt_tokens) - min(start, self.prompt_tokens)
        if tokens > 0 and self.first_token_s < 0:
            self.reused[tier] = self.reused.get(tier, 0) + tokens

    def reuse_other_class(self, start: int, stop: int, *, counted: int) -> None:
        """Positions ``[start, stop)`` were computed by replicas of another numeric class; those
        below ``counted`` were reused before, and replaced."""
        if stop > start:
            self.exact_until = min(self.exact_until, start)
        tokens = min(stop, self.prompt_tokens) - min(counted, self.prompt_tokens)
        if tokens > 0 and self.first_token_s < 0:
            self.other_class_tokens += tokens

    @property
    def disk_tokens(self) -> int:
        """Prompt tokens reused from a disk, this node's or another's."""
        return sum(tokens for tier, tokens in self.reused.items() if tier is not Tier.RAM)

    def stats(self, now_s: float) -> RequestStats:
        """Accounting as of ``now_s``."""
        ram, disk = self.reused.get(Tier.RAM, 0), self.disk_tokens
        queued_until = self.admitted_s if self.admitted_s >= 0 else now_s
        forward = self.first_forward_s
        blended = self.blended
        token = self.first_token_s if self.first_token_s >= 0 else now_s
        speculation = self.speculation
        return RequestStats(
            prompt_tokens=self.prompt_tokens,
            ram_tokens=ram,
            disk_tokens=disk,
            computed_tokens=self.prompt_tokens - ram - disk - blended.kept,
            blended_tokens=blended.kept,
            repaired_tokens=blended.repaired,
            expected_kl=blended.expected_kl,
            blend_refusal=blended.reason,
            probed=blended.probed,
            other_class_tokens=self.other_class_tokens,
            output_tokens=self.output_tokens,
            queue_ms=(queued_until - self.submitted_s) * 1e3,
            load_ms=self.load_ms,
            prefill_ms=(token - forward) * 1e3 if forward >= 0 else 0.0,
            decode_ms=max(now_s - token, 0.0) * 1e3,
            blocks=tuple(
                VerifiedBlocks(drafted, accepted, steps)
                for (drafted, accepted), steps in sorted(self.blocks.items())
            ),
            trace=tuple(speculation.trace) if speculation is not None else (),
            text_drafts=speculation.text_drafts if speculation is not None else 0,
            model_drafts=speculation.model_drafts if speculation is not None else 0,
        )
