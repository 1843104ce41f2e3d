"""How an admitted sequence gets KV that exists already: from another sequence, or from the store.

Admission puts a sequence through JOINING (another one holds or computes its prefix) and LOADING (a
loader thread searches and reads the store) into RUNNING; each stage is skipped where it cannot
help, and each wait is bounded. If another replica computes what the store lacks, LOADING is
repeated now and then, with AWAITING in between, which occupies no thread. The engine thread only
copies and polls here, it never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rakv_cluster.clock import Clock
from rakv_cluster.engine.keeping import Keeper
from rakv_cluster.engine.residents import Residents
from rakv_cluster.engine.sequence import Phase, Sequence
from rakv_cluster.engine.settings import EngineSettings
from rakv_cluster.engine.stats import Counters
from rakv_cluster.kv.buffer import BufferPool, KvBuffer
from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.kv.transfer import Transfer
from rakv_cluster.model.watch import UNWATCHED, AttentionWatch
from rakv_cluster.reuse.assembly import Assembled, LoadJob
from rakv_cluster.reuse.blender import Blended, Blender, BlendSupport
from rakv_cluster.reuse.costs import Costs
from rakv_cluster.reuse.flights import RENEW_SHARE, Claimant, Departure, give_up
from rakv_cluster.reuse.metering import MeteredStore
from rakv_cluster.reuse.probing import question_start
from rakv_cluster.reuse.saver import Saver
from rakv_cluster.reuse.workers import Workers
from rakv_cluster.store.base import ChunkStore
from rakv_cluster.store.flight import SingleFlight
from rakv_cluster.types import Tier

_SHORTEST_DEADLINE_S = 0.25
"""A load is given at least this long: thread scheduling alone can take some of it."""


_WATCHED_SHARE = 0.5
"""Watching the question takes some thousandths of computing so much of a prompt."""


@dataclass(frozen=True, slots=True)
class Polled:
    """Whether any wait ``advanced``; ``displaced`` are loading, were given up, and have no memory
    to go on in: they are to leave."""

    advanced: bool
    displaced: tuple[Sequence, ...]


class Prefixes:
    """Runs the JOINING and LOADING phases of the engine's sequences."""

    def __init__(
        self,
        *,
        store: ChunkStore,
        flight: SingleFlight,
        pool: BufferPool,
        layout: KvLayout,
        transfer: Transfer,
        costs: Costs,
        saver: Saver,
        keeper: Keeper,
        loaders: Workers,
        settings: EngineSettings,
        numeric_class: str,
        clock: Clock,
        counters: Counters,
        wake: Callable[[], None],
        blending: BlendSupport,
    ) -> None:
        self._store = store
        self._flight = flight
        self._pool = pool
        self._layout = layout
        self._transfer = transfer
        self._costs = costs
        self._saver = saver
        self._keeper = keeper
        self._loaders = loaders
        self._settings = settings
        self._numeric_class = numeric_class
        self._clock = clock
        self._counters = counters
        self._wake = wake
        self._blender = Blender(
            blending,
            store,
            layout,
            numeric_class=numeric_class,
            share_across_classes=settings.share_across_classes,
            price_loads=settings.price_loads,
            openings=saver.openings,
        )
        self._residents = Residents()
        self._store_paused_until_s = float("-inf")

    def begin(self, sequence: Sequence) -> None:
        """Take an admitted sequence (buffer leased, length 0) into its first phase."""
        sequence.waiting_since_s = self._clock.monotonic_s()
        sequence.flight_until_s = -1.0
        sequence.one_by_one, sequence.replaying = 0, False
        sequence.question = UNWATCHED
        sequence.restart_reuse()
        if not sequence.use_store:
            sequence.phase = Phase.RUNNING
            return
        donor = self._residents.find(sequence)
        if not sequence.blends:
            # What a blended sequence holds is not for others.
            self._residents.add(sequence)
        if donor is None:
            self._load(sequence)
            return
        sequence.donor, sequence.donor_tokens = donor.sequence, donor.tokens
        sequence.phase = Phase.JOINING
        # Who blends goes on faster from what is there; what is in the background is late.
        waits = not sequence.blends and not donor.sequence.request.background
        if not waits or donor.sequence.length >= donor.tokens:
            self._take_share(sequence)

    def poll(self, sequences: Iterable[Sequence]) -> Polled:
        """Advance sequences whose wait is over."""
        now_s = self._clock.monotonic_s()
        advanced = False
        displaced: list[Sequence] = []
        for sequence in list(sequences):
            waited_s = now_s - sequence.waiting_since_s
            if sequence.phase is Phase.JOINING:
                advanced |= self._poll_join(sequence, waited_s)
            elif sequence.phase is Phase.LOADING:
                try:
                    advanced |= self._poll_load(sequence, waited_s)
                except MemoryError:
                    displaced.append(sequence)
            elif sequence.phase is Phase.AWAITING and waited_s >= self._settings.flight.poll_s:
                self._load(sequence)
                advanced = True
            elif sequence.phase is Phase.RUNNING and now_s >= sequence.renew_at_s:
                self._renew_claims(sequence, now_s)
        return Polled(advanced or bool(displaced), tuple(displaced))

    def next_deadline_s(self, sequence: Sequence) -> float:
        """When a waiting sequence has to be looked at even if nothing happens."""
        if sequence.phase is Phase.JOINING:
            return sequence.waiting_since_s + self._settings.join_s
        if sequence.phase is Phase.LOADING:
            return sequence.waiting_since_s + self._load_limit_s(sequence)
        if sequence.phase is Phase.AWAITING:
            return sequence.waiting_since_s + self._settings.flight.poll_s
        return float("inf")

    def leave(
        self, sequence: Sequence, active: Iterable[Sequence], *, poisoned: bool = False
    ) -> None:
        """Take ``sequence`` out of its phase and release its buffer.

        Those who wait for its prefix take what there is first. A buffer that a loader thread may
        still write to, or that is ``poisoned`` (its last forward failed), is not used again.
        """
        for follower in list(active):
            if follower.phase is Phase.JOINING and follower.donor is sequence:
                self._take_share(follower)
        self._residents.remove(sequence)
        buffer, job = sequence.buffer, sequence.job
        sequence.buffer = sequence.job = sequence.donor = None
        if buffer is None:
            return
        loading = job is not None and not job.done
        if job is not None:
            job.abandon()
        if loading or poisoned:
            self._pool.discard(buffer)
        else:
            self._pool.release(buffer)

    def give_up_claims(self, sequence: Sequence, *, kept_tokens: int) -> None:
        """Let others compute what an ending request claimed and will not store.

        Leases on what it has stored, or is about to, end when that arrives.
        """
        # A job that is done may not have been looked at yet.
        newest = sequence.job.leave() if sequence.job is not None else ()
        lost = [chunk for chunk in newest or sequence.claimed if chunk.end > kept_tokens]
        sequence.claimed, sequence.renew_at_s = (), float("inf")
        if lost:
            holder = sequence.request.request_id
            self._loaders.submit(lambda: give_up(lost, self._flight, holder))

    def _renew_claims(self, sequence: Sequence, now_s: float) -> None:
        """Keep the leases on what is still to be computed and stored."""
        unsaved = sequence.chunked.chunks[sequence.next_save :]
        claimed = [
            chunk for chunk in sequence.claimed if unsaved and chunk.start >= unsaved[0].start
        ]
        sequence.renew_at_s = now_s + RENEW_SHARE * sequence.lease_s if claimed else float("inf")
        if claimed:
            claimant, lease_s = self._claimant(sequence), sequence.lease_s
            self._loaders.submit(lambda: claimant.renew(claimed, lease_s))

    def _claimant(self, sequence: Sequence) -> Claimant:
        return Claimant(
            self._flight,
            self._settings.flight,
            sequence.request.request_id,
            has_waited=sequence.flight_until_s >= 0,
        )

    def _poll_join(self, sequence: Sequence, waited_s: float) -> bool:
        donor = sequence.donor
        ready = donor is not None and donor.length >= sequence.donor_tokens
        if not ready and waited_s < self._settings.join_s:
            return False
        self._counters.join_timeouts += not ready
        self._take_share(sequence)
        return True

    def _take_share(self, sequence: Sequence) -> None:
        """Copy what the donor has of the shared prefix, and look for the rest in the store."""
        donor, buffer = sequence.donor, sequence.buffer
        if donor is None or donor.buffer is None or buffer is None:
            raise AssertionError("a joining sequence has a donor, and both have buffers")
        tokens = min(sequence.donor_tokens, donor.exact_length)
        sequence.donor = None
        if tokens:
            buffer.slots(0, tokens).copy_(donor.buffer.slots(0, tokens))
            buffer.length = tokens
            sequence.reuse_from(Tier.RAM, 0, tokens)
            self._counters.shared_tokens += tokens
            # Chunks inside the share are the donor's to store.
            sequence.stored_keys |= {
                chunk.prefix_key for chunk in sequence.chunked.chunks if chunk.end <= tokens
            }
        self._load(sequence)

    def _load(self, sequence: Sequence) -> None:
        """Start the search in the store, unless one more token is all there is to compute."""
        now_s = self._clock.monotonic_s()
        sequence.load_ms += (now_s - sequence.waiting_since_s) * 1e3
        sequence.waiting_since_s = now_s
        sequence.phase = Phase.RUNNING
        if sequence.remaining <= 1 or now_s < self._store_paused_until_s:
            return
        self._watch_question(sequence)
        self._keeper.cover(sequence)
        background = sequence.request.background
        job = LoadJob(
            prompt=sequence.chunked,
            buffer=sequence.buffer,
            layout=self._layout,
            transfer=self._transfer,
            store=MeteredStore(self._store, self._clock),
            costs=self._costs.view(now_s),
            numeric_class=self._numeric_class,
            share_across_classes=self._settings.share_across_classes,
            price_loads=self._settings.price_loads,
            have=sequence.length,
            claimant=self._claimant(sequence),
            # What a blended sequence computes is not stored, what is in the background is late:
            # both claim nothing and wait for none.
            prompt_tokens=0 if sequence.blends or background else sequence.prompt_tokens,
            settle=self._saver.settle,
            wake=self._wake,
            blend=self._blend_of(sequence),
        )
        if self._loaders.submit(job.run):
            sequence.job, sequence.phase = job, Phase.LOADING

    def _blend_of(self, sequence: Sequence) -> Callable[[ChunkStore, KvBuffer, int], Blended]:
        """What the sequence's load does behind its exact prefix."""
        # Coming back from preemption a stream goes on exactly: its account is closed.
        if not sequence.blends or sequence.first_token_s >= 0:
            return lambda _store, _buffer, _covered: Blended()
        request, total = sequence.request, sequence.count
        costs = self._costs.view(self._clock.monotonic_s())

        def blend(store: ChunkStore, buffer: KvBuffer, covered: int) -> Blended:
            return replace(self._blender, store=store).blend(
                request.blend, request.prompt, buffer, costs, covered=covered, known_tokens=total
            )

        return blend

    def _poll_load(self, sequence: Sequence, waited_s: float) -> bool:
        job = sequence.job
        if job is None:
            raise AssertionError("a loading sequence has a job")
        if job.done:
            self._finish_load(sequence, job, job.state)
            if sequence.first_token_s < 0:
                sequence.blend(job.blended)
            self._await_flight(sequence, job.departure)
            return True
        if waited_s < self._load_limit_s(sequence):
            return False
        self._abandon_load(sequence, job)
        return True

    def _load_limit_s(self, sequence: Sequence) -> float:
        """A load may take as long as computing would, within the configured deadline."""
        if not self._settings.price_loads:
            return self._settings.load_deadline_s
        costs = self._costs.view(self._clock.monotonic_s())
        compute_s = costs.prefill_ms(sequence.length, sequence.count) / 1e3
        return min(self._settings.load_deadline_s, max(compute_s, _SHORTEST_DEADLINE_S))

    def _abandon_load(self, sequence: Sequence, job: LoadJob) -> None:
        """Go on without the rest of a load, in another buffer; raises ``MemoryError``, with the
        load where it was, if there is none."""
        now_s = self._clock.monotonic_s()
        self._counters.load_timeouts += 1
        self._store_paused_until_s = now_s + self._settings.load_deadline_s
        for timing in job.store.unfinished():
            self._costs.observe_stuck_load(timing.tier, timing.stored_bytes, timing.ms, now_s)
        old = sequence.buffer
        if old is None:
            raise AssertionError("a loading sequence has a buffer")
        new = self._pool.replace(old)
        state = job.abandon()
        new.slots(0, state.tokens).copy_(old.slots(0, state.tokens))
        sequence.buffer = new
        self._finish_load(sequence, job, state)

    def _watch_question(self, sequence: Sequence) -> None:
        """See what the question attends to in a prompt most of which is computed and stored."""
        layers = self._blender.support.probe.layers
        cold = sequence.remaining >= _WATCHED_SHARE * sequence.prompt_tokens
        watched = layers and cold and not sequence.blends and sequence.first_token_s < 0
        sequence.question = UNWATCHED
        if watched:
            first = question_start(sequence.request.prompt)
            sequence.question = AttentionWatch(layers, first)

    def _await_flight(self, sequence: Sequence, departure: Departure) -> None:
        """Look again later if another replica computes the rest and there is time left."""
        if not departure.waits:
            return
        now_s = self._clock.monotonic_s()
        if sequence.flight_until_s < 0:
            sequence.flight_until_s = now_s + self._settings.flight.longest_s
            self._counters.flights_awaited += 1
        if now_s >= sequence.flight_until_s:
            self._counters.flight_timeouts += 1
            return
        sequence.waiting_since_s = now_s
        sequence.phase = Phase.AWAITING

    def _finish_load(self, sequence: Sequence, job: LoadJob, state: Assembled) -> None:
        buffer = sequence.buffer
        if buffer is None:
            raise AssertionError("a loading sequence has a buffer")
        now_s, departure = self._clock.monotonic_s(), job.departure
        shared = buffer.length
        buffer.length = state.tokens
        sequence.job = None
        sequence.phase = Phase.RUNNING
        sequence.load_ms += (now_s - sequence.waiting_since_s) * 1e3
        sequence.stored_keys |= state.stored_keys
        if departure.claimed:
            sequence.claimed, sequence.lease_s = departure.claimed, departure.lease_s
            sequence.renew_at_s = now_s + RENEW_SHARE * departure.lease_s
        if state.tokens < shared:
            other_class = sequence.exact_until, min(sequence.other_class_tokens, state.tokens)
            sequence.restart_reuse()
            sequence.exact_until, sequence.other_class_tokens = other_class
            sequence.reuse_from(Tier.RAM, 0, state.tokens)
        position = min(shared, state.tokens)
        for source in state.sources:
            end = min(source.end, state.tokens)
            sequence.reuse_from(source.tier, position, end)
            if source.numeric_class != self._numeric_class:
                sequence.reuse_other_class(source.start, end, counted=position)
            position = max(position, end)
        self._watch_question(sequence)
        self._counters.load_failures += state.failed
        for timing in job.store.timings():
            self._costs.observe_load(timing.tier, timing.stored_bytes, timing.ms, now_s)
