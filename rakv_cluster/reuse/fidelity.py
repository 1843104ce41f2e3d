"""What a blended prompt's next tokens lose against full recompute, measured on one model.

A case is a prompt of documents whose KV was computed in another order. It keeps the exact KV and
logits, the donors' KV moved into place, and what selectors may know; any number of selections is
then measured on the same donors, each by the one forward that a blended request would run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rakv_cluster.kv.buffer import KvBuffer, Positions
from rakv_cluster.kv.layout import bits, kv_dtype
from rakv_cluster.kv.rotary import KeyRotation
from rakv_cluster.model.drift import NO_DRIFT, Drift
from rakv_cluster.model.step import Runner, Span, Step
from rakv_cluster.model.watch import UNWATCHED, AttentionWatch
from rakv_cluster.reuse.blending import positions_to_compute
from rakv_cluster.reuse.probing import NOT_PROBED, Probe, ProbeSettings
from rakv_cluster.reuse.selection import Floats, Reused, Selector, unknown
from rakv_cluster.reuse.sensitivity import sensitivity

REFERENCE_TOKENS = 32
PIECE_ROWS = 512
"""Of a forward, unless told otherwise."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FidelityPrompt:
    """``front``, then ``documents``, then ``question`` (not empty); ``answer`` may be empty.

    The donors' KV stems from the prompt with the documents in the order ``donor_order``;
    ``other_order`` is another one, by which sensitivity is learned. Importance is learned from
    ``donor_question``, which stood behind the donors (empty: it is not known).
    """

    front: Ids
    documents: tuple[Ids, ...]
    question: Ids
    donor_order: tuple[int, ...]
    other_order: tuple[int, ...]
    answer: Ids = ()
    donor_question: Ids = ()

    @property
    def ids(self) -> Ids:
        """All tokens of the prompt."""
        return (*self.front, *_joined(self.documents), *self.question)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Positions ``[start, stop)`` of each document."""
        return _places(len(self.front), [len(document) for document in self.documents])


@dataclass(frozen=True, slots=True)
class Measured:
    """One selection on one case, over the reference tokens (greedy from full recompute, at most
    32).

    ``kl`` is the mean divergence of blended from exact next-token distributions in nats,
    ``first_kl`` that of the first token; ``top1`` the share of equal first choices; ``agreement``
    the share of reference tokens before the first unequal one. ``answer_logp`` is the mean
    log-probability per token of the case's answer, and ``exact_answer_logp`` that of full
    recompute; both 0 without an answer. ``text`` are the selection's own greedy tokens, where they
    were asked for.
    """

    repaired: int
    kl: float
    first_kl: float
    top1: float
    agreement: float
    answer_logp: float = 0.0
    exact_answer_logp: float = 0.0
    text: Ids = ()


class FidelityCase:
    """See the module. ``ends`` are token ids after which no reference tokens follow; with
    ``probe`` selectors may know the question's attention.

    ``reordered_answer_logp`` is the answer's log-probability per token by full recompute with the
    documents in the donors' order, and ``reordered_text`` the greedy tokens (0 and none without an
    answer): what a request that is served in an order that is cached loses or wins.
    """

    def __init__(
        self,
        runner: Runner,
        rotation: KeyRotation,
        prompt: FidelityPrompt,
        ends: frozenset[int] = frozenset(),
        probe: ProbeSettings = NOT_PROBED,
        *,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        self._runner = runner
        self._piece_rows, self._rotation = piece_rows, rotation
        self._prompt = prompt
        self._ends = ends
        self._ids = prompt.ids
        self._room = len(self._ids) + max(REFERENCE_TOKENS, len(prompt.answer))
        exact = _buffer(runner, self._room)
        rows = [len(self._ids) - 1]
        first = self._compute(exact, self._ids, np.arange(len(self._ids)), rows)
        self.reference, self._logits = self._greedy(exact, (), first[0])
        self._answer_logp = self._score(exact, self._logits[:1])
        donor_buffer = self._in_order(prompt.donor_order)
        importance = self._importance(donor_buffer, probe)
        self.reordered_text, self.reordered_answer_logp = self._reordered(donor_buffer)
        donors = _donated(donor_buffer, prompt, prompt.donor_order)
        others = _donated(self._in_order(prompt.other_order), prompt, prompt.other_order)
        self._moved = _moved(exact, donors, prompt, rotation)
        reused = _reused(prompt, exact, donors, others, self._moved, importance=importance)
        self.reused = self._probed(reused, probe) if probe.layers else reused

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._ids)

    def measure(
        self, selector: Selector, fraction: float, *, text: bool = False, follow: bool = True
    ) -> Measured:
        """Repair ``fraction`` of the documents' tokens as ``selector`` chooses, and compare.

        With ``text`` the selection also writes its own, which takes up to 31 steps. The others
        ``follow`` what is repaired (see :mod:`rakv_cluster.model.drift`), or stay as they are.
        """
        count = round(fraction * len(self.reused.positions))
        repaired = selector(self.reused, count)
        buffer = KvBuffer(self._moved.data.clone())
        known = (*self._ids, *self.reference)
        total = len(self._ids) + len(self.reference) - 1
        left = positions_to_compute(
            self.reused.positions, repaired, covered=len(self._prompt.front), total=total
        )
        rows = list(range(len(left) - len(self.reference), len(left)))
        drift = Drift(self._rotation, self.reused.runs, left) if follow else NO_DRIFT
        logits = self._compute(buffer, known, left, rows, drift=drift)
        written = self._written(buffer, logits) if text else ()
        found = self._compared(len(repaired), logits, self._score(buffer, logits[:1]))
        return replace(found, text=written)

    def _in_order(self, order: Sequence[int]) -> KvBuffer:
        """KV of the front and the documents in that order, as long as the prompt's."""
        ids = (*self._prompt.front, *_joined([self._prompt.documents[i] for i in order]))
        buffer = _buffer(self._runner, self._room)
        self._compute(buffer, ids, np.arange(len(ids)), [])
        return buffer

    def _importance(self, buffer: KvBuffer, settings: ProbeSettings) -> Floats:
        """What the donors' question attends to of each document's tokens, in the prompt's order.

        Overwrites slots behind the documents.
        """
        prompt, stop = self._prompt, self._prompt.places[-1][1]
        if not prompt.donor_question or not settings.layers:
            return unknown(stop - len(prompt.front))
        question = prompt.donor_question[: buffer.capacity - stop]
        ids = (*self._ids[:stop], *question)
        watch = AttentionWatch(settings.layers, stop)
        self._compute(buffer, ids, np.arange(stop, len(ids)), [], watch=watch)
        seen: Floats = watch.figures(stop).numpy()
        places = _places_in(prompt, prompt.donor_order)
        return np.concatenate([seen[start:end] for start, end in places])

    def _reordered(self, buffer: KvBuffer) -> tuple[Ids, float]:
        """Text and the answer's score where the documents keep the donors' order.

        Computes the question.
        """
        if not self._prompt.answer:
            return (), 0.0
        start = self._prompt.places[-1][1]
        tail = np.arange(start, len(self._ids))
        first = self._compute(buffer, self._ids, tail, [len(tail) - 1])
        text, _ = self._greedy(buffer, (), first[0])
        return text, self._score(buffer, first)

    def _probed(self, reused: Reused, settings: ProbeSettings) -> Reused:
        """With the question's attention over the unrepaired rest."""
        covered, total = len(self._prompt.front), len(self._ids)
        probe = Probe.of(settings, reused, 0, covered=covered, total=total)
        buffer = KvBuffer(self._moved.data.clone())
        self._compute(buffer, self._ids, probe.first_pass(), [], watch=probe.watch)
        return probe.attended()

    def _compared(self, repaired: int, logits: torch.Tensor, answer_logp: float) -> Measured:
        exact, blended = self._logits.log_softmax(-1), logits.log_softmax(-1)
        divergence = (exact.exp() * (exact - blended)).sum(-1).clamp_min(0)
        equal = exact.argmax(-1) == blended.argmax(-1)
        same = int(equal.int().cumprod(0).sum())
        return Measured(
            repaired=repaired,
            kl=float(divergence.mean()),
            first_kl=float(divergence[0]),
            top1=float(equal.float().mean()),
            agreement=same / len(self.reference),
            answer_logp=answer_logp,
            exact_answer_logp=self._answer_logp,
        )

    def _written(self, buffer: KvBuffer, logits: torch.Tensor) -> Ids:
        """The greedy tokens of a buffer that holds the reference's KV behind the prompt."""
        own = logits.argmax(-1).tolist()
        pairs = zip(own, self.reference, strict=True)
        same = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(own))
        if same == len(own):
            return self.reference
        return self._greedy(buffer, self.reference[:same], logits[same])[0]

    def _greedy(
        self, buffer: KvBuffer, known: Ids, following: torch.Tensor
    ) -> tuple[Ids, torch.Tensor]:
        """Greedy tokens behind the prompt, of which ``known`` are in the buffer; ``following`` are
        the logits behind them. With the logits that chose each new one ``[n, vocab]``."""
        tokens = list(known)
        chosen = [following]
        while True:
            tokens.append(int(chosen[-1].argmax()))
            if len(tokens) == REFERENCE_TOKENS or tokens[-1] in self._ends:
                return tuple(tokens), torch.stack(chosen)
            ids = (*self._ids, *tokens)
            at = np.array([len(ids) - 1])
            chosen.append(self._compute(buffer, ids, at, [0])[0])

    def _score(self, buffer: KvBuffer, first: torch.Tensor) -> float:
        """Mean log-probability of the answer behind a prompt whose KV is in ``buffer``.

        ``first`` ``[1, vocab]`` are the prompt's logits. Overwrites slots behind the prompt.
        """
        answer = self._prompt.answer
        if not answer:
            return 0.0
        logits = first
        if len(answer) > 1:
            start = len(self._ids)
            positions = np.arange(start, start + len(answer) - 1)
            rest = self._compute(
                buffer,
                (*self._ids, *answer),
                positions,
                list(range(len(positions))),
            )
            logits = torch.cat([first, rest])
        scores = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        return float(scores.mean())

    def _compute(
        self,
        buffer: KvBuffer,
        ids: Sequence[int],
        positions: Positions,
        rows: Sequence[int],
        *,
        watch: AttentionWatch = UNWATCHED,
        drift: Drift = NO_DRIFT,
    ) -> torch.Tensor:
        """Run ``ids`` at ascending ``positions`` in pieces; logits of the given ``rows`` on the
        CPU."""
        known = torch.tensor(ids)
        parts: list[torch.Tensor] = []
        for start in range(0, len(positions), self._piece_rows):
            piece = torch.from_numpy(positions[start : start + self._piece_rows])
            wanted = torch.tensor(
                [row - start for row in rows if start <= row < start + len(piece)],
                dtype=torch.int64,
            )
            span = Span(buffer, 0, len(piece), int(piece[0]), int(piece[-1]), watch, drift)
            step = Step(known[piece], piece, (span,), wanted)
            parts.append(self._runner.forward(step).cpu().clone())
        return torch.cat(parts)


def _buffer(runner: Runner, tokens: int) -> KvBuffer:
    shape = runner.layout.shape(-(-tokens // 64) * 64)
    return KvBuffer(torch.zeros(shape, dtype=runner.layout.torch_dtype, device=runner.device))


def _places_in(prompt: FidelityPrompt, order: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of each document where they stand in that order."""
    lengths = [len(prompt.documents[index]) for index in order]
    by_document = dict(zip(order, _places(len(prompt.front), lengths), strict=True))
    return [place for _, place in sorted(by_document.items())]


def _donated(
    buffer: KvBuffer, prompt: FidelityPrompt, order: Sequence[int]
) -> list[tuple[int, torch.Tensor]]:
    """Where each document stands in ``buffer``, which has them in that order, and its KV."""
    return [(start, buffer.slots(start, stop).clone()) for start, stop in _places_in(prompt, order)]


def _moved(
    exact: KvBuffer,
    donors: Sequence[tuple[int, torch.Tensor]],
    prompt: FidelityPrompt,
    rotation: KeyRotation,
) -> KvBuffer:
    """The exact front, and the donors' KV with its keys moved to where the documents stand."""
    buffer = KvBuffer(torch.zeros_like(exact.data))
    front = len(prompt.front)
    buffer.slots(0, front).copy_(exact.slots(0, front))
    for (start, stop), (donor_start, kv) in zip(prompt.places, donors, strict=True):
        slots = buffer.slots(start, stop)
        slots.copy_(kv)
        rotation.move(slots[:, 0], start - donor_start)
    return buffer


def _reused(
    prompt: FidelityPrompt,
    exact: KvBuffer,
    donors: Sequence[tuple[int, torch.Tensor]],
    others: Sequence[tuple[int, torch.Tensor]],
    moved: KvBuffer,
    *,
    importance: Floats,
) -> Reused:
    """All documents' positions and what selectors may know of them."""
    dtype = kv_dtype(exact.data.dtype)
    figures = [
        unknown(len(document))
        if _in_front(prompt.donor_order, index) == _in_front(prompt.other_order, index)
        else sensitivity(bits(one.cpu()), bits(two.cpu()), dtype)
        for index, (document, (_, one), (_, two)) in enumerate(
            zip(prompt.documents, donors, others, strict=True)
        )
    ]
    deviations: list[Floats] = []
    for start, stop in prompt.places:
        layer = min(1, exact.data.shape[0] - 1)
        difference = exact.values(layer)[:, start:stop] - moved.values(layer)[:, start:stop]
        deviations.append(difference.float().square().sum((0, 2)).cpu().numpy())
    return Reused(
        np.concatenate([np.arange(start, stop) for start, stop in prompt.places]),
        np.concatenate([np.arange(stop - start) for start, stop in prompt.places]),
        np.concatenate(figures),
        importance,
        np.concatenate(deviations),
        unknown(len(importance)),
    )


def _in_front(order: Sequence[int], document: int) -> Sequence[int]:
    """What stands in front of a document. A service learns nothing from the same prefix again."""
    return order[: order.index(document)]


def _places(start: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    places = []
    for length in lengths:
        places.append((start, start + length))
        start += length
    return places


def _joined(documents: Sequence[Ids]) -> Ids:
    return tuple(token_id for document in documents for token_id in document)
