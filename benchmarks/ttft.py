"""Time to first token through the whole service: no cache, prefix in RAM, prefix on disk, chat.

    python -m benchmarks.ttft [--short] [--json F] [--check] [--seed N]

Starts a real server and asks over HTTP with streaming; the first token is taken at the client.
For each set of documents: question 1 fills the cache, question 2 is asked without cache and with
the prefix in RAM. After a restart of the whole service, with the store's pages dropped from the
page cache, question 3 is asked with the prefix on disk and without cache. Chat: the second turn
(same documents, the answer, a new question) with and without cache. Ratios are paired per set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.corpus import Corpus, DocumentSet, load_corpus
from rakv_cluster.cli.local_service import LocalService, local_service
from rakv_cluster.client import Answer, Client, Document, Message
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import load_settings
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer

CLOCK = SystemClock()
DOCUMENTS, DOCUMENT_TOKENS, MAX_TOKENS = 4, 450, 24
BOUNDS = {"ram": 10.0, "disk": 6.0, "chat turn 2": 8.0}


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation about a set of documents; its last message asks."""

    documents: DocumentSet
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """One question with the cache and, for reference, without."""

    arm: str
    plain: Answer
    cached: Answer

    @property
    def ratio(self) -> float:
        """How much sooner the first token came."""
        return self.plain.ttft_s / self.cached.ttft_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    tokenizer = load_tokenizer(resolve(names.model, load_settings().cache_path))
    corpus = load_corpus(
        2 if options.short else 6,
        DOCUMENTS,
        DOCUMENT_TOKENS,
        count_tokens=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    with tempfile.TemporaryDirectory(prefix="rakv-ttft-") as folder:
        pairs, page_cache = _measure(corpus, Path(folder), names.model)
    return _report(options, corpus, pairs, page_cache)


def _measure(corpus: Corpus, folder: Path, model: str) -> tuple[list[Pair], str]:
    # Without the warm-up, which would have the disk's chunks in RAM before the first question.
    flags = {"model": model, "store-dir": str(folder / "store"), "set": "warm_up_s=0"}
    pairs: list[Pair] = []
    with local_service(flags, log=folder / "first.log", clock=CLOCK) as service:
        _ask(service, _question(corpus.sets[0], 3), reuse="off")  # not counted: warms the process
        for documents in corpus.sets:
            first = _ask(service, _question(documents, 0), reuse="exact")
            pairs.append(_pair(service, "ram", _question(documents, 1)))
            pairs.append(_pair(service, "chat turn 2", _second_turn(documents, first)))
    page_cache = _drop_page_cache(folder / "store")
    with local_service(flags, log=folder / "second.log", clock=CLOCK) as service:
        for documents in corpus.sets:
            pairs.append(_pair(service, "disk", _question(documents, 2)))
    return pairs, page_cache


def _question(documents: DocumentSet, index: int) -> Question:
    return Question(documents, (Message("user", documents.questions[index]),))


def _second_turn(documents: DocumentSet, first: Answer) -> Question:
    turns = (Message("assistant", first.text), Message("user", documents.questions[1]))
    return Question(documents, (*_question(documents, 0).messages, *turns))


def _pair(service: LocalService, arm: str, question: Question) -> Pair:
    """Ask with the cache first, so that nothing of the plain run can help it."""
    cached = _ask(service, question, reuse="exact")
    return Pair(arm, _ask(service, question, reuse="off"), cached)


def _ask(service: LocalService, question: Question, *, reuse: Literal["exact", "off"]) -> Answer:
    documents = [Document(d["text"], d["id"]) for d in question.documents.api_documents()]
    with Client(service.base_url, retries=NO_RETRIES, clock=CLOCK) as client:
        return client.chat(
            question.messages,
            documents=documents,
            reuse=reuse,
            max_tokens=MAX_TOKENS,
            temperature=0,
        )


def _drop_page_cache(store: Path) -> str:
    """Ask the kernel to forget the store's pages; says whether they are really gone."""
    files = [path for path in store.rglob("*") if path.is_file()]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no fincore)"
    resident = sum(map(int, done.stdout.split()))
    total = sum(path.stat().st_blocks * 512 for path in files)
    return "cold" if resident < 0.02 * total else f"warm ({resident / total:.0%} resident)"


def _report(options: Options, corpus: Corpus, pairs: list[Pair], page_cache: str) -> int:
    print(f"documents: {corpus.origin}\npage cache before the disk arm: {page_cache}")
    arms = {arm: [pair for pair in pairs if pair.arm == arm] for arm in BOUNDS}
    equal = sum(pair.cached.text == pair.plain.text for pair in pairs)
    medians = {arm: statistics.median(pair.ratio for pair in found) for arm, found in arms.items()}
    rows = [_row(arm, found, medians[arm]) for arm, found in arms.items()]
    headings = ["arm", "n", "prompt", "ram", "disk", "no cache ms", "cached ms", "ratio", "equal"]
    print(table(rows, headings))
    requirements = [
        Requirement(f"{arm}: no cache / cached TTFT", medians[arm], ">=", bound)
        for arm, bound in BOUNDS.items()
    ]
    requirements.append(Requirement("equal texts", equal / len(pairs), ">=", 1.0))
    results = {
        "documents": corpus.origin,
        "page_cache_before_disk_arm": page_cache,
        "medians": medians,
        "pairs": [{**asdict(pair), "ratio": pair.ratio} for pair in pairs],
    }
    return finish(options, results, requirements)


def _row(arm: str, pairs: list[Pair], ratio: float) -> list[object]:
    last = pairs[-1].cached
    return [
        arm,
        len(pairs),
        last.usage["prompt_tokens"],
        last.rakv["tokens"]["ram"],
        last.rakv["tokens"]["disk"],
        round(statistics.median(pair.plain.ttft_s for pair in pairs) * 1e3),
        round(statistics.median(pair.cached.ttft_s for pair in pairs) * 1e3),
        f"{ratio:.1f}x",
        f"{sum(pair.cached.text == pair.plain.text for pair in pairs)}/{len(pairs)}",
    ]


def _extra() -> argparse.ArgumentParser:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--model", default="smollm2", help="what to serve")
    return extra


if __name__ == "__main__":
    sys.exit(main())
