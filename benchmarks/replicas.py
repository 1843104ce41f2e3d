"""Two replicas of a real model: the router against power of two choices, and its explanations.

    python -m benchmarks.replicas [--short] [--json F] [--check] [--seed N]

Two services on this machine, each of two replicas that share the threads, differ in their router
only and take turns: every document is asked about several times, in random order, by one client
after another, with other questions. KV is kept in RAM (what is on disk serves all replicas of a
node alike). Time to first token is taken at the client; a document's first question is no part of
it. Before each question the router is asked to explain itself; what it expected of the replica it
chose is compared with what the request then took. Starts Ray: run it in a loopback-only network
namespace (scripts/loopback).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.corpus import Corpus, load_corpus
from rakv_cluster.cli.local_service import LocalService, local_service
from rakv_cluster.client import Client, Document
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer

CLOCK = SystemClock()
ROUTERS = ("power_of_two", "expected_time")
DOCUMENT_TOKENS, MAX_TOKENS = 600, 12


@dataclass(frozen=True, slots=True)
class Turn:
    """One question; ``expected_ms`` is what the explanation promised of the chosen replica."""

    router: str
    document: int
    first: bool
    ttft_ms: float
    total_ms: float
    cached_tokens: int
    expected_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="what to serve")
    options, names = parse_options(__doc__ or "", argv, extra=extra)
    tokenizer = load_tokenizer(resolve(names.model, load_settings().cache_path))
    documents, repeats = (4, 3) if options.short else (8, 5)
    corpus = load_corpus(
        documents,
        1,
        DOCUMENT_TOKENS,
        count_tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    with tempfile.TemporaryDirectory(prefix="rakv-replicas-") as folder, ExitStack() as stack:
        services = {
            router: stack.enter_context(_service(Path(folder), router, names.model))
            for router in ROUTERS
        }
        turns = _measure(services, corpus, repeats, random.Random(options.seed))
    return _report(options, corpus, turns)


def _service(folder: Path, router: str, model: str) -> AbstractContextManager[LocalService]:
    config = folder / f"{router}.yaml"
    config.write_text(f"store: memory\nrouter: {router}\nreplicas: 2\n")
    flags = {"model": model, "config": str(config)}
    return local_service(flags, log=folder / f"{router}.log", clock=CLOCK)


def _measure(
    services: dict[str, LocalService], corpus: Corpus, repeats: int, rng: random.Random
) -> list[Turn]:
    """The same questions in the same order to every service, one at a time, by turns."""
    order = [document for document in range(len(corpus.sets)) for _ in range(repeats)]
    rng.shuffle(order)
    for service in services.values():  # not counted: warms the processes and shows costs
        for number in range(4):
            _ask(service, "warm", "Hello " * 200 + str(number), f"What is {number}?")
    asked = [0] * len(corpus.sets)
    turns = []
    for document in order:
        text, questions = corpus.sets[document].documents[0], corpus.sets[document].questions
        question = f"({asked[document]}) {questions[asked[document] % len(questions)]}"
        for router in rng.sample(ROUTERS, len(ROUTERS)):
            ttft, total, cached, expected = _ask(services[router], str(document), text, question)
            first = asked[document] == 0
            turns.append(Turn(router, document, first, ttft, total, cached, expected))
        asked[document] += 1
    return turns


def _ask(
    service: LocalService, name: str, text: str, question: str
) -> tuple[float, float, int, float]:
    """TTFT, total and reuse of an answer, and what its router expected just before."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "documents": [{"id": name, "text": text}],
        "max_tokens": MAX_TOKENS,
    }
    explained = httpx.post(f"{service.base_url}/v1/route/explain", json=body, timeout=600.0)
    expected_ms = 0.0
    if explained.status_code == 200:  # power of two has nothing to explain
        said = explained.json()
        chosen = next(each for each in said["replicas"] if each["replica"] == said["chosen"])
        expected_ms = float(chosen["expected_ms"])
    with Client(service.base_url, retries=NO_RETRIES, clock=CLOCK) as client:
        answer = client.chat(
            question,
            documents=[Document(text, name)],
            max_tokens=MAX_TOKENS,
            temperature=0,
            ignore_eos=True,
        )
    return answer.ttft_s * 1e3, answer.total_s * 1e3, answer.cached_tokens, expected_ms


def _report(options: Options, corpus: Corpus, turns: list[Turn]) -> int:
    print(f"documents: {corpus.origin}")
    means, rows = {}, []
    for router in ROUTERS:
        again = [turn for turn in turns if turn.router == router and not turn.first]
        means[router] = statistics.fmean(turn.ttft_ms for turn in again)
        hits = statistics.fmean(turn.cached_tokens > DOCUMENT_TOKENS / 2 for turn in again)
        p50 = statistics.median(turn.ttft_ms for turn in again)
        rows.append((router, len(again), means[router], p50, hits))
    print(table(rows, ("router", "repeats", "mean ttft ms", "p50", "found in RAM")))
    mine = [turn for turn in turns if turn.router == "expected_time" and turn.expected_ms > 0]
    error = statistics.median(abs(t.expected_ms / t.total_ms - 1) for t in mine)
    gain = means["power_of_two"] / means["expected_time"]
    requirements = [
        Requirement("mean TTFT on repeats: power of two / expected time", gain, ">=", 1.0),
        Requirement("median error of the explanation", error, "<=", 0.25),
    ]
    results = {"documents": corpus.origin, "mean_ttft_ms": means, "gain": gain,
               "explanation_error": error, "turns": [asdict(turn) for turn in turns]}  # fmt: skip
    return finish(options, results, requirements)


if __name__ == "__main__":
    sys.exit(main())
