"""Which verified KV of a sequence is stored, and when.

Chunks of the prompt go under their prefix keys. What the prompt has behind its last complete
chunk, and generated tokens, go under tail keys: one record per chunk they make, each under the
tail key of what stands in front of it, so that a reader can follow them whatever the next turn's
cuts are (docs/adr/0030). Copies are made when the first token is out, one per step, so that storing
delays no first token and no stream by more than one chunk's copy; the rest when the request ends.
"""

from __future__ import annotations

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.keys import ROOT, head_lengths, tail_key
from rakv_cluster.chunking.prompt import extend
from rakv_cluster.engine.sequence import Sequence
from rakv_cluster.reuse.costs import CostView
from rakv_cluster.reuse.saver import Saver


class Keeper:
    """Offers a sequence's finished chunks to the saver, each once."""

    def __init__(self, saver: Saver, cuts: CutTable, limits: ChunkLimits) -> None:
        self._saver = saver
        self._cuts = cuts
        self._limits = limits

    def cover(self, sequence: Sequence) -> None:
        """Extend ``sequence.chunked`` over all tokens known."""
        covered = len(sequence.chunked.token_ids)
        if covered < sequence.count:
            new_ids = sequence.ids[covered : sequence.count].tolist()
            sequence.chunked = extend(sequence.chunked, new_ids, self._cuts, self._limits)

    def keep_one(self, sequence: Sequence, costs: CostView) -> bool:
        """Offer the next chunk that is complete in verified KV; False if there is none."""
        if not sequence.use_store or sequence.buffer is None:
            return False
        if sequence.count - len(sequence.chunked.token_ids) >= self._limits.max_tokens:
            self.cover(sequence)
        chunks = sequence.chunked.chunks
        while sequence.next_save < len(chunks):
            index = sequence.next_save
            chunk = chunks[index]
            if chunk.end > sequence.exact_length:
                return False
            sequence.next_save += 1
            key = chunk.prefix_key
            if index >= sequence.prompt_chunks:
                key = _tail_key(sequence, index, chunk.start, chunk.end)
            elif key in sequence.stored_keys or self._saver.is_pending(key):
                continue
            self._offer(sequence, key, chunk.start, chunk.end, costs)
            return True
        return False

    def keep_rest(self, sequence: Sequence, costs: CostView) -> None:
        """Offer everything verified that was not offered yet, including the open tail."""
        if not sequence.use_store or sequence.buffer is None:
            return
        self.cover(sequence)
        while self.keep_one(sequence, costs):
            pass
        index = sequence.next_save
        start = sequence.chunked.chunks[index - 1].end if index else 0
        stop = sequence.exact_length
        if start < stop:
            self._offer(sequence, _tail_key(sequence, index, start, stop), start, stop, costs)

    def _offer(
        self, sequence: Sequence, key: bytes, start: int, stop: int, costs: CostView
    ) -> None:
        if sequence.buffer is None or stop > sequence.exact_length:
            raise AssertionError("only verified, exact KV is stored")
        self._saver.offer(
            key,
            sequence.chunked.namespace,
            tuple(sequence.ids[start:stop].tolist()),
            buffer=sequence.buffer,
            start=start,
            cost_ms=costs.prefill_ms(start, stop),
            importance=sequence.importance(start, stop),
        )


def _tail_key(sequence: Sequence, index: int, start: int, stop: int) -> bytes:
    """Key of the tail at ``[start, stop)`` behind chunk ``index - 1``.

    Its head are prompt tokens only: a later request for the same prompt has those, whatever it
    or the next turn has behind them.
    """
    parent = sequence.chunked.chunks[index - 1].prefix_key if index else ROOT
    of_prompt = max(min(stop, sequence.prompt_tokens) - start, 0)
    head = sequence.ids[start : start + head_lengths(of_prompt)[0]]
    return tail_key(sequence.chunked.namespace, parent, head)
