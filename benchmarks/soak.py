"""Mixed traffic on three nodes while things break, each answer checked against the plain model.

    python -m benchmarks.soak [--minutes N] [--short] [--json F] [--check] [--seed N]

Traffic: HTTP streams, gRPC calls and `rakv batch` jobs, drawn by seed from a catalogue of chats
about documents, greedy and sampled. The right answer of each is known before: the stock
transformers model decodes it one token at a time without any cache, by the one token rule. A
seeded schedule kills replicas, shards and nodes, flips bytes in records, stops a shard (and with
it its part of the directory), fills a disk; what lasts is ended before the next event.

Counted: wrong answers (text or token count), failures other than refusals for load (429, 503),
memory of the Ingress and of the largest replica, late against early. A tiny random model unless
--model says otherwise: what is tested is everything around it. Run under scripts/loopback.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.common import Options, Requirement, finish, parse_options, table
from benchmarks.soak_cluster import NODES, Chaos, own_disk, release_disk, service, stop
from rakv_cluster.client import Client, Document
from rakv_cluster.client.grpc import GrpcClient
from rakv_cluster.client.requests import Options as Fields
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.errors import Overloaded, RakvError, Unavailable
from rakv_cluster.model.fetch import resolve
from rakv_cluster.model.loader import load_tokenizer
from rakv_cluster.model.sampling import RuleRow, TokenRule, choose
from rakv_cluster.serving import template
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_llama
from rakv_cluster.types import SamplingParams

MAX_TOKENS, DOCUMENTS, DOCUMENT_LINES = 24, 5, 24
EVENT_S, HEAL_S, SAMPLE_S, READY_S = 10.0, 5.0, 2.0, 240.0
MEMORY_BOUND, MEMORY_MINUTES = 1.10, 5.0
SETTINGS = {
    "price_loads": False, "packed_budget_bytes": 0, "ram_budget_bytes": "16MiB",
    "disk_budget_bytes": "48MiB", "kv_budget_bytes": "256MiB", "request_timeout_s": 120,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose right answer is known."""

    question: str
    documents: tuple[Document, ...]
    fields: Fields
    text: str
    output_tokens: int


@dataclass(slots=True)
class Tally:
    """What became of the requests; written by several threads."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, surface: str, case: Case, text: str, output_tokens: int) -> None:
        """Compare an answer; ``output_tokens`` < 0 if unknown."""
        with self._lock:
            if text == case.text and output_tokens in {-1, case.output_tokens}:
                self.right[surface] += 1
            else:
                got = f"{text!r} ({output_tokens} tokens)"
                self.wrong.append(f"{surface}: {got}, not {case.text!r} ({case.output_tokens})")

    def raised(self, surface: str, error: BaseException) -> None:
        """Count a refusal for load, or a failure."""
        # A lost connection is Unavailable as well, but says no time to come back: nobody refused.
        said = isinstance(error, RakvError) and error.retry_after_s is not None
        with self._lock:
            if isinstance(error, Overloaded | Unavailable) and said:
                self.refused[surface] += 1
            else:
                self.failed.append(f"{surface}: {error!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, return the exit status."""
    options, names = parse_options(__doc__ or "", argv, extra=_extra())
    minutes = 1.0 if options.short else names.minutes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rakv-soak-") as name:
        folder = Path(name)
        model = names.model
        if model == "tiny":
            model = str(save_tiny_model(folder / "tiny", tiny_llama(seed=3, layers=4)))
        cases = catalogue(resolve(model, Path("~/.cache/rakv").expanduser()), options.seed)
        store = folder / "store"
        mounted = own_disk(store / NODES[-1])
        chaos = Chaos(store, random.Random(options.seed), own_disk=mounted)
        try:
            with service(chaos, store, model, SETTINGS) as (url, target):
                soak = Soak(options.seed, chaos, Place(folder, url, target), cases)
                soak.wait_until_ready()
                soak.run(60 * minutes)
        finally:
            stop(chaos)
            release_disk(store / NODES[-1])
    return report(options, soak, minutes)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for files, and where the service answers over HTTP and gRPC."""

    folder: Path
    url: str
    target: str


class Soak:
    """Traffic and trouble for a time."""

    def __init__(self, seed: int, chaos: Chaos, place: Place, cases: Sequence[Case]) -> None:
        self.tally = Tally()
        self.events: list[tuple[float, str, str]] = []
        self.memory: list[tuple[float, int, int]] = []
        self._seed, self._chaos, self._cases = seed, chaos, cases
        self._folder, self._url, self._target = place.folder, place.url, place.target
        self._over = threading.Event()

    def wait_until_ready(self) -> None:
        """Raises ``SystemExit`` with the service's log if it does not come up."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            try:
                if httpx.get(f"{self._url}/metrics", timeout=5).text.find("rakv_replicas 3.0") > 0:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise SystemExit((self._folder / "serve.log").read_text()[-5000:])

    def run(self, duration_s: float) -> None:
        """Returns when the time is over and every request has ended."""
        work: list[Callable[[random.Random], None]] = [self._http] * 3 + [self._grpc, self._batch]
        threads = [
            threading.Thread(target=self._repeat, args=(one, self._seed * 100 + number))
            for number, one in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        started_s = time.monotonic()
        schedule = random.Random(self._seed)
        actions: list[str] = []
        next_s, heal_s = EVENT_S, float("inf")
        while (now_s := time.monotonic() - started_s) < duration_s:
            if now_s >= heal_s:
                self._chaos.heal()
                heal_s = float("inf")
            if now_s >= next_s and now_s < duration_s - EVENT_S:
                actions = actions or schedule.sample(sorted(self._chaos.actions), 6)
                name = actions.pop()
                self.events.append((now_s, name, self._chaos.actions[name]()))
                next_s, heal_s = now_s + EVENT_S, now_s + HEAL_S
            ingress = sum(self._chaos.resident_bytes(":Ingress"))
            replica = max(self._chaos.resident_bytes(":Worker"), default=0)
            self.memory.append((now_s, ingress, replica))
            time.sleep(SAMPLE_S)
        self._chaos.heal()
        self._over.set()
        for thread in threads:
            thread.join()

    def _repeat(self, one: Callable[[random.Random], None], seed: int) -> None:
        draw = random.Random(seed)
        while not self._over.is_set():
            one(draw)

    def _http(self, draw: random.Random) -> None:
        case = draw.choice(self._cases)
        try:
            with Client(self._url, retries=NO_RETRIES, timeout_s=180) as client:
                answer = client.chat(case.question, documents=case.documents, **case.fields)
        except RakvError as error:
            self.tally.raised("http", error)
            self._over.wait(0.5)
            return
        self.tally.answered("http", case, answer.text, answer.output_tokens)

    def _grpc(self, draw: random.Random) -> None:
        case = draw.choice(self._cases)
        try:
            with GrpcClient(self._target, retries=NO_RETRIES, timeout_s=180) as client:
                answer = client.chat(case.question, documents=case.documents, **case.fields)
        except RakvError as error:
            self.tally.raised("grpc", error)
            self._over.wait(0.5)
            return
        self.tally.answered("grpc", case, answer.text, answer.output_tokens)

    def _batch(self, draw: random.Random) -> None:
        """A job of a few greedy cases; it retries refusals itself."""
        greedy = [case for case in self._cases if not case.fields["temperature"]]
        cases = draw.sample(greedy, 6)
        job = self._folder / f"batch-{draw.getrandbits(32)}"
        (job / "docs").mkdir(parents=True)
        rows = []
        for case in cases:
            for document in case.documents:
                (job / "docs" / document.id).write_text(document.text)
            rows.append(json.dumps({
                "prompt": case.question, "documents": [d.id for d in case.documents],
            }))  # fmt: skip
        (job / "rows.jsonl").write_text("\n".join(rows))
        run = [sys.executable, "-m", "rakv_cluster.cli", "batch", "run", "--url", self._url,
               "--docs", job / "docs", "--prompts", job / "rows.jsonl", "--window", "2",
               "--out", job / "out.jsonl", "--max-tokens", str(MAX_TOKENS)]  # fmt: skip
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        if done.returncode not in {0, 1}:
            self.tally.raised("batch", RuntimeError(done.stderr[-500:]))
            return
        answers = [json.loads(x) for x in (job / "out.jsonl").read_text().splitlines()]
        if len(answers) != len(cases):
            self.tally.raised("batch", RuntimeError(f"{len(answers)} rows of {len(cases)}"))
        for case, row in zip(cases, answers, strict=False):
            if row["error"]:
                self.tally.raised("batch", RuntimeError(str(row["error"])))
            else:
                self.tally.answered("batch", case, row["text"], -1)


def catalogue(model: str, seed: int, *, count: int = 20) -> list[Case]:
    """Chats about documents, with what the plain model says to each."""
    draw = random.Random(seed)
    tokenizer = load_tokenizer(model)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    renderer = PromptRenderer(tokenizer)
    documents = [
        Document("".join(f"Line {i} of {d}: {draw.random()}.\n" for i in range(DOCUMENT_LINES)), d)
        for d in (f"d{number}" for number in range(DOCUMENTS))
    ]
    cases = []
    for number in range(count):
        chosen = tuple(draw.sample(documents, draw.choice([1, 1, 2])))
        fields: Fields = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
        if number % 3 == 2:
            fields = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": number}
        question = f"Question {number}?"
        rendered = renderer.chat(
            [template.Message("user", question)],
            [template.Document(d.text, f"{d.id}.txt") for d in chosen],
        )
        ids = [token for segment in rendered.segments for token in segment]
        params = SamplingParams(temperature=fields["temperature"], seed=fields.get("seed", 0))
        output = _plain(stock, ids, params, stop=tokenizer.eos_token_id)
        cases.append(
            Case(
                question,
                tuple(Document(d.text, f"{d.id}.txt") for d in chosen),
                fields,
                renderer.token_bytes.text(output),
                len(output),
            )
        )
    return cases


@torch.inference_mode()
def _plain(
    stock: torch.nn.Module, ids: Sequence[int], params: SamplingParams, *, stop: int
) -> list[int]:
    """The tokens in front of the stop token, or up to the limit."""
    rule, cache = TokenRule(params, ids, stock.config.vocab_size), DynamicCache()
    fresh, output = list(ids), []
    while len(output) < MAX_TOKENS:
        answer = stock(input_ids=torch.tensor([fresh]), cache=cache, use_cache=True)
        row = RuleRow(rule, position=len(ids) + len(output))
        (choice,) = choose(answer.logits[:, -1].float(), [row])
        rule.accept(choice.token_id)
        fresh = [choice.token_id]
        if choice.token_id == stop:
            break
        output += fresh
    return output


def report(options: Options, soak: Soak, minutes: float) -> int:
    """Print what happened and what is required of it."""
    tally = soak.tally
    print(table(soak.events, ["after s", "event", "what"]))
    for line in (tally.wrong + tally.failed)[:20]:
        print(line)
    surfaces = ("http", "grpc", "batch")
    rows = [[name, tally.right[name], tally.refused[name]] for name in surfaces]
    print(table(rows, ["surface", "right", "refused (429, 503)"]))
    growth = {"ingress": _growth(soak.memory, 1), "replica": _growth(soak.memory, 2)}
    requirements = [
        Requirement("wrong answers", len(tally.wrong), "<=", 0),
        Requirement("failed requests other than refused ones", len(tally.failed), "<=", 0),
        *(
            Requirement(f"right answers over {name}", tally.right[name], ">=", 1)
            for name in surfaces
        ),
    ]
    if minutes >= MEMORY_MINUTES:
        requirements += [
            Requirement(f"memory of the {name}, last quarter / second", ratio, "<=", MEMORY_BOUND)
            for name, ratio in growth.items()
        ]
    results = {
        "minutes": minutes, "right": dict(tally.right), "refused": dict(tally.refused),
        "wrong": tally.wrong, "failed": tally.failed, "events": soak.events,
        "memory_growth": growth, "memory": soak.memory,
    }  # fmt: skip
    return finish(options, results, requirements)


def _growth(memory: Sequence[tuple[float, int, int]], column: int) -> float:
    """Median of the last quarter over that of the second: behind the start."""
    values = [sample[column] for sample in memory if sample[column]]
    quarter = len(values) // 4
    if not quarter:
        return 1.0
    late, early = values[-quarter:], values[quarter : 2 * quarter]
    return statistics.median(late) / statistics.median(early)


def _extra() -> argparse.ArgumentParser:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--minutes", type=float, default=10.0, help="how long")
    extra.add_argument("--model", default="tiny", help="tiny, or what to serve")
    return extra


if __name__ == "__main__":
    sys.exit(main())
