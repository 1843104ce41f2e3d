"""This service beside what one would pick instead, in one run, on the same prompts.

    python -m benchmarks.peers [--short] [--json F] [--check] [--seed N] [--url U --url-model M]
        [--only ttft,tasks,together]

Peers: transformers (a greedy loop on the stock model; its prompt lookup where drafts are asked
for), the same with a prefix cache, kvboost where it is installed, any OpenAI-compatible server by
URL. Timers are the same, at the caller; for this service that includes HTTP. One that cannot run
here is listed with its reason. For each set of documents, in an order that rotates:

  cold            documents never seen
  same prefix     another question about the same documents
  reordered       the same documents in another order
  new in front    one more document before them
  restart         another question after a restart of the process (what is on disk stays)

then decoding alone, four requests at once, and tasks with something to copy. Documents that a peer
puts in another order are given to plain transformers in that order. Ours is compared on each line
with the fastest other that answers as plain decoding does there. Fidelity is against plain
transformers on the same ids: the share of tokens up to the first difference (an exact method has 1
but for ties), and the KL of the first token's distribution where a peer shows it. Output that
repeats itself makes drafts look good: the share of tokens in repeated 8-grams is printed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.corpus import DocumentSet, load_corpus
from benchmarks.peers_adapters import (
    Absent,
    KvBoost,
    OpenAiServer,
    Peer,
    Prompt,
    Rakv,
    RakvService,
    Said,
    Transformers,
    TransformersPrefix,
    together,
)
from rakv_cluster.client import Document
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer
from rakv_cluster.serving import template
from rakv_cluster.serving.prompting import PromptRenderer

OURS, REORDER = "rakv", "rakv (reorder)"
TOKENS, NGRAM = 16, 8
SAME = 0.999
"""Mean agreement from which on a peer counts as one of equal fidelity."""
LINES = ("cold", "same prefix", "reordered", "new in front", "restart")
TASKS = {
    "copy": "Repeat the first document word for word.",
    "edit": "Repeat the first document word for word, but write every name in capital letters.",
    "chat": "What is this about? Answer in your own words.",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer in its place."""

    peer: str
    line: str
    said: Said
    agreement: float
    kl: float


class Bench:
    """The prompts' maker and what was measured."""

    def __init__(
        self,
        renderer: PromptRenderer,
        decode: Callable[[Sequence[int]], str],
        peers: Sequence[Peer],
    ) -> None:
        self.renderer, self.peers, self._decode = renderer, list(peers), decode
        self.weights = {peer.name: peer.weights for peer in peers}
        self.measured: list[Measured] = []
        self.skipped: dict[str, str] = {}
        self._plain = next(peer for peer in peers if peer.name == "transformers")
        self._reference: dict[tuple[int, ...], Said] = {}
        self._turn = 0

    def prompt(self, documents: Sequence[Document], question: str) -> Prompt:
        """What the service's own renderer makes of it, so that all peers see the same ids."""
        rendered = self.renderer.chat(
            [template.Message("user", question)],
            [template.Document(d.text, d.id) for d in documents],
        )
        ids = tuple(token for segment in rendered.segments for token in segment)
        return Prompt(ids, self._decode(ids), tuple(documents), question)

    def line(self, name: str, prompt: Prompt, tokens: int, *, speculate: bool = False) -> None:
        """Every peer answers once; who begins rotates."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        self._turn += 1
        at = self._turn % len(self.peers)
        for peer in self.peers[at:] + self.peers[:at]:
            said = peer.ask(prompt, tokens, speculate=speculate)
            self.measured.append(Measured(peer.name, name, said, *self._fidelity(prompt, said)))

    def restart(self) -> None:
        """Restart each; one that cannot be is asked no more."""
        for peer in tuple(self.peers):
            try:
                peer.restart()
            except Absent as reason:
                self.skipped[f"{peer.name}, restart"] = str(reason)
                self.peers.remove(peer)

    def _fidelity(self, prompt: Prompt, said: Said) -> tuple[float, float]:
        plain = self._plain_answer(prompt, said.order)
        if said.ids:
            ids, right = said.ids[:TOKENS], plain.ids[:TOKENS]
            same = next((i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b),
                        min(len(ids), len(right)))  # fmt: skip
            agreement = same / max(min(len(ids), len(right)), 1)
        else:
            length = min(len(said.text), len(plain.text))
            same = next((i for i in range(length) if said.text[i] != plain.text[i]), length)
            agreement = same / max(length, 1)
        if said.first_logits is None or plain.first_logits is None:
            return agreement, float("nan")
        left, right_log = (
            torch.log_softmax(logits.float(), -1)
            for logits in (plain.first_logits, said.first_logits[: len(plain.first_logits)])
        )
        return agreement, float((left.exp() * (left - right_log)).sum())

    def _plain_answer(self, prompt: Prompt, order: tuple[str, ...]) -> Said:
        """Plain decoding of the prompt, with its documents in ``order`` where that is given."""
        if order and order != tuple(document.id for document in prompt.documents):
            by_id = {document.id: document for document in prompt.documents}
            prompt = self.prompt([by_id[name] for name in order], prompt.question)
        if prompt.ids not in self._reference:
            self._reference[prompt.ids] = self._plain.ask(prompt, TOKENS)
        return self._reference[prompt.ids]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    model = resolve(names.model, load_settings().cache_path)
    tokenizer = load_tokenizer(model)
    count = 2 if options.short else 5
    corpus = load_corpus(
        count + 1, 4, 150 if options.short else 400,
        count_tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )  # fmt: skip
    renderer = PromptRenderer(tokenizer)
    # Text as the service makes it: special tokens stand for none.
    service = RakvService(model, ("exact", "reorder"))
    peers, skipped = _peers(service, names, renderer.token_bytes.text)
    try:
        bench = Bench(renderer, tokenizer.decode, peers)
        bench.skipped |= skipped
        parts = set(names.only.split(","))
        rounds = corpus.sets[: 1 if options.short else 3]
        decode = _tasks(bench, rounds, 16 if options.short else 96) if "tasks" in parts else {}
        tokens = 8 if options.short else 48
        at_once = _together(bench, corpus.sets, tokens) if "together" in parts else {}
        if "ttft" in parts:
            _ttft(bench, corpus.sets[:-1], service)
    finally:
        for closing in (*peers, service):
            closing.close()
    return _report(options, bench, decode, at_once, corpus.origin)


def _peers(
    service: RakvService, names: argparse.Namespace, decode: Callable[[Sequence[int]], str]
) -> tuple[list[Peer], dict[str, str]]:
    torch.set_num_threads(names.threads or torch.get_num_threads())
    plain = Transformers(service.model, decode)
    peers: list[Peer] = [plain, TransformersPrefix(plain, decode)]
    skipped: dict[str, str] = {}
    makers: dict[str, Callable[[], Peer]] = {
        "kvboost": lambda: KvBoost(service.model),
        OURS: lambda: Rakv(service, OURS, "exact"),
        REORDER: lambda: Rakv(service, REORDER, "reorder", reuse="reorder"),
    }
    if names.url:
        makers[names.url] = lambda: OpenAiServer(names.url, names.url_model)
    else:
        skipped["OpenAI-compatible server"] = "no --url (llama.cpp, vLLM)"
    for name, make in makers.items():
        try:
            peers.append(make())
        except Absent as reason:
            skipped[name] = str(reason)
    return peers, skipped


def _ttft(bench: Bench, sets: Sequence[DocumentSet], service: RakvService) -> None:
    again: list[Prompt] = []
    for documents in sets:
        parts = [Document(text, f"d{i}") for i, text in enumerate(documents.documents)]
        front, rest = parts[-1], parts[:-1]
        ask = documents.questions
        bench.line("cold", bench.prompt(rest, ask[0]), TOKENS)
        bench.line("same prefix", bench.prompt(rest, ask[1]), TOKENS)
        bench.line("reordered", bench.prompt([*rest[1:], rest[0]], ask[1]), TOKENS)
        bench.line("new in front", bench.prompt([front, *rest], ask[1]), TOKENS)
        again.append(bench.prompt(rest, ask[2]))
    service.restart()
    bench.restart()
    for prompt in again:
        bench.line("restart", prompt, TOKENS)


def _tasks(bench: Bench, sets: Sequence[DocumentSet], tokens: int) -> dict[str, dict[str, float]]:
    """Tokens per second behind the first token, by task and peer, median of the sets; plain and
    with drafts."""
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, documents in enumerate(sets):
        parts = [Document(documents.documents[0][:600], f"t{number}")]
        for (task, question), speculate in itertools.product(TASKS.items(), (False, True)):
            name = f"{task}, drafts" if speculate else task
            bench.line(name, bench.prompt(parts, question), tokens, speculate=speculate)
            for one in bench.measured[-len(bench.peers) :]:
                said = one.said
                seconds = max(said.total_s - said.ttft_s, 1e-9)
                rates[name][one.peer].append((said.tokens - 1) / seconds)
    return {
        name: {peer: statistics.median(seen) for peer, seen in row.items()}
        for name, row in rates.items()
    }


def _together(bench: Bench, sets: Sequence[DocumentSet], tokens: int) -> dict[str, float]:
    parts = [Document(text, f"c{i}") for i, text in enumerate(sets[-1].documents[:2])]
    prompts = [bench.prompt(parts, f"Question {i}: what is this about?") for i in range(4)]
    return {peer.name: together(peer, prompts, tokens) for peer in bench.peers}


def _report(
    options: Options,
    bench: Bench,
    decode: Mapping[str, Mapping[str, float]],
    at_once: Mapping[str, float],
    origin: str,
) -> int:
    names = list(bench.weights)
    print(f"documents: {origin}")
    for name, weights in bench.weights.items():
        print(f"  {name}: weights {weights}")
    for name, reason in bench.skipped.items():
        print(f"  skipped: {name}: {reason}")
    measured = {m.line for m in bench.measured}
    ttft = {x: {n: _median(bench, n, x) for n in names} for x in LINES if x in measured}
    print("\ntime to first token, ms (median)")
    print(table([[x, *row.values()] for x, row in ttft.items()], ["", *names]))
    print("\ntokens per second behind the first")
    print(table([[x, *(r[n] for n in names)] for x, r in decode.items()], ["", *names]))
    print("\nfour requests at once, seconds until all are answered")
    print(table([["", *at_once.values()]], ["", *at_once]))
    print("\nfidelity to plain transformers")
    rows = [_fidelity(bench, name) for name in names]
    print(table(rows, ["", "agreement", "worst", "KL of first token", "repeated 8-grams"]))
    by_line = {x: {n: _agreement(bench, n, x) for n in names} for x in (*ttft, *decode)}
    print("\nagreement by line")
    print(table([[x, *(row[n] for n in names)] for x, row in by_line.items()], ["", *names]))
    ours_agrees = rows[names.index(OURS)][1]
    compared: list[tuple[str, Mapping[str, float], Mapping[str, float]]] = [
        *((f"TTFT, {x}", _inverse(row), by_line[x]) for x, row in ttft.items()),
        *((f"tokens/s, {x}", row, by_line[x]) for x, row in decode.items()),
    ]
    if at_once:
        compared.append(("four at once", _inverse(at_once), {}))
    requirements = [
        *itertools.starmap(_ahead, compared),
        Requirement(f"{OURS}: greedy agreement", ours_agrees, ">=", SAME),
    ]
    results: dict[str, Any] = {
        "ttft_ms": ttft, "tokens_per_s": decode, "four_at_once_s": at_once,
        "fidelity": {row[0]: row[1:] for row in rows}, "skipped": bench.skipped,
        "weights": bench.weights, "documents": origin,
    }  # fmt: skip
    return finish(options, results, requirements)


def _ahead(name: str, speed: Mapping[str, float], agreement: Mapping[str, float]) -> Requirement:
    """This service against the fastest other that answers as plain decoding does on this line.

    The speed of one that answers otherwise is printed; it is not speed at equal fidelity.
    """
    best = 0.0
    for peer, value in speed.items():
        if peer.startswith(OURS) or math.isnan(value):
            continue
        if agreement.get(peer, 1.0) >= SAME:
            best = max(best, value)
        else:
            print(f"{name}: {peer} answers otherwise (agreement {agreement[peer]:.2f}), "
                  f"at {value / speed[OURS]:.2f} times our speed")  # fmt: skip
    return Requirement(f"{name}: {OURS} / best other", speed[OURS] / best, ">=", 1.0)


def _inverse(times: Mapping[str, float]) -> dict[str, float]:
    return {peer: 1 / time for peer, time in times.items()}


def _agreement(bench: Bench, peer: str, line: str) -> float:
    found = [m.agreement for m in bench.measured if (m.peer, m.line) == (peer, line)]
    return statistics.mean(found) if found else math.nan


def _median(bench: Bench, peer: str, line: str) -> float:
    found = [m.said.ttft_s * 1e3 for m in bench.measured if (m.peer, m.line) == (peer, line)]
    return statistics.median(found) if found else math.nan


def _fidelity(bench: Bench, peer: str) -> list[Any]:
    lines = [m for m in bench.measured if m.peer == peer]
    shown = [m.kl for m in lines if not math.isnan(m.kl)]
    return [
        peer,
        statistics.mean(m.agreement for m in lines),
        min(m.agreement for m in lines),
        statistics.mean(shown) if shown else "not shown",
        statistics.mean(_repeated(m.said.text) for m in lines),
    ]


def _repeated(text: str) -> float:
    """Share of a text's 8-grams of words that occur more than once in it."""
    words = text.split()
    grams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _extra() -> argparse.ArgumentParser:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--only", default="ttft,tasks,together", help="parts, by commas")
    extra.add_argument("--model", default="smollm2", help="what all of them run")
    extra.add_argument("--threads", type=int, default=0, help="torch threads of the peers here")
    extra.add_argument("--url", default="", help="an OpenAI-compatible server to measure too")
    extra.add_argument("--url-model", default="", help="the model's name there")
    return extra


if __name__ == "__main__":
    sys.exit(main())
