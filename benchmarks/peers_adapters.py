"""What one would pick instead, each behind the same three calls. Timers are at the caller.

An adapter that cannot run here raises :class:`Absent` with the reason from its constructor.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rakv_cluster.cli.local_service import local_service
from rakv_cluster.client import Client, Document
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.clock import SystemClock
from rakv_cluster.serving.keys import KeyTable, new_key, write_table

CLOCK = SystemClock()


class Absent(Exception):
    """Why a peer cannot be measured here."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question about documents: as ids, as text, and in parts."""

    ids: tuple[int, ...]
    text: str
    documents: tuple[Document, ...]
    question: str


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: its text, when its first token came and when it ended, seconds from the call.

    ``ids`` are empty where a peer does not tell them; ``first_logits`` too. ``order`` are the ids
    of the documents where the peer put them in an order of its own.
    """

    text: str
    ttft_s: float
    total_s: float
    tokens: int
    ids: tuple[int, ...] = ()
    first_logits: torch.Tensor | None = field(default=None, compare=False)
    order: tuple[str, ...] = ()


class Peer(Protocol):
    """Something that continues prompts greedily."""

    name: str
    weights: str

    def ask(self, prompt: Prompt, tokens: int, *, speculate: bool = False) -> Said:
        """Exactly ``tokens`` tokens, unless the peer can only stop at the model's end."""
        ...

    def restart(self) -> None:
        """Lose what a restart of the process would lose."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Transformers:
    """The stock model, a greedy loop, no cache between requests."""

    def __init__(self, model: str, decode: Callable[[Sequence[int]], str]) -> None:
        self.name = "transformers"
        self.weights = f"{model}, float32"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._decode = decode

    def ask(self, prompt: Prompt, tokens: int, *, speculate: bool = False) -> Said:
        """With ``speculate``: transformers' own prompt lookup, through ``generate``."""
        if speculate:
            return self._lookup(prompt, tokens)
        return self._loop(prompt, tokens, DynamicCache(), 0)

    def restart(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.inference_mode()
    def _loop(self, prompt: Prompt, tokens: int, cache: Any, known: int) -> Said:
        started_s = time.perf_counter()
        fresh, output, first = list(prompt.ids[known:]), [], None
        ttft_s = 0.0
        while len(output) < tokens:
            step = self.model(
                input_ids=torch.tensor([fresh]), cache=cache, use_cache=True, logits_to_keep=1
            )
            logits = step.logits[0, -1]
            fresh = [int(logits.argmax())]
            output += fresh
            if first is None:
                first, ttft_s = logits, time.perf_counter() - started_s
        total_s = time.perf_counter() - started_s
        return Said(self._decode(output), ttft_s, total_s, len(output), tuple(output), first)

    @torch.inference_mode()
    def _lookup(self, prompt: Prompt, tokens: int) -> Said:
        first_s: list[float] = []

        class Clock:
            """``generate`` calls ``put`` with the prompt and then with new tokens."""

            def put(self, value: torch.Tensor) -> None:
                first_s.append(time.perf_counter())

            def end(self) -> None:
                pass

        started_s = time.perf_counter()
        ids = torch.tensor([prompt.ids])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, prompt_lookup_num_tokens=8, streamer=Clock(),
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        total_s = time.perf_counter() - started_s
        return Said(
            self._decode(output), first_s[1] - started_s, total_s, len(output), tuple(output)
        )


class TransformersPrefix(Transformers):
    """The stock model with a cache of earlier prompts' KV, by longest common prefix."""

    def __init__(self, plain: Transformers, decode: Callable[[Sequence[int]], str]) -> None:
        self.name = "transformers + prefix cache"
        self.weights = plain.weights
        self.model = plain.model
        self._decode = decode
        self._kept: list[tuple[tuple[int, ...], Any]] = []

    def ask(self, prompt: Prompt, tokens: int, *, speculate: bool = False) -> Said:
        """The search and the copy count; keeping the prompt's KV afterwards does not."""
        started_s = time.perf_counter()
        known, cache = max(
            ((_common(ids, prompt.ids), cache) for ids, cache in self._kept),
            key=lambda found: found[0],
            default=(0, None),
        )
        known = min(known, len(prompt.ids) - 1)
        cache = copy.deepcopy(cache) if known else DynamicCache()
        _cut(cache, known)
        lookup_s = time.perf_counter() - started_s
        said = self._loop(prompt, tokens, cache, known)
        _cut(cache, len(prompt.ids))
        self._kept = [*self._kept[-7:], (prompt.ids, cache)]
        return Said(
            said.text, said.ttft_s + lookup_s, said.total_s + lookup_s, said.tokens, said.ids,
            said.first_logits,
        )  # fmt: skip

    def restart(self) -> None:
        """All of it lives in this process."""
        self._kept = []


class KvBoost:
    """kvboost from PyPI, on float32 weights like the others (its own default is float16)."""

    def __init__(self, model: str) -> None:
        try:
            kvboost = importlib.import_module("kvboost")
        except ImportError as error:
            raise Absent(f"pip install kvboost==0.9.0 ({error})") from error
        from transformers import AutoTokenizer  # noqa: PLC0415  # only this adapter needs it

        self.name = "kvboost"
        self.weights = f"{model}, float32"
        stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._engine = kvboost.KVBoost(
            model=stock, tokenizer=tokenizer, max_cache_bytes=2 << 30, device="cpu"
        )

    def ask(self, prompt: Prompt, tokens: int, *, speculate: bool = False) -> Said:
        """Times of its tokens are taken in the callback that it streams with."""
        times_s: list[float] = []
        ids: list[int] = []

        def seen(token_id: int) -> None:
            times_s.append(time.perf_counter())
            ids.append(token_id)

        started_s = time.perf_counter()
        result = self._engine.generate(prompt.text, max_new_tokens=tokens, on_token=seen)
        total_s = time.perf_counter() - started_s
        ttft_s = (times_s[0] if times_s else time.perf_counter()) - started_s
        logits = result.first_token_logits
        first = None if logits is None else torch.tensor(logits).flatten().float()
        return Said(result.output_text, ttft_s, total_s, result.generated_tokens, tuple(ids), first)

    def restart(self) -> None:
        """Its cache is in memory as it is used here."""
        self._engine.reset_cache()

    def close(self) -> None:
        """Nothing to end."""


class OpenAiServer:
    """Any OpenAI-compatible server by URL: llama.cpp, vLLM, ..."""

    def __init__(self, url: str, model: str) -> None:
        self.name = f"{model or 'model'} at {url}"
        self.weights = "as that server was started"
        self._http = httpx.Client(base_url=url, timeout=600)
        self._model = model
        try:
            self._http.get("/v1/models").raise_for_status()
        except httpx.HTTPError as error:
            raise Absent(f"no answer from {url}: {error}") from error

    def ask(self, prompt: Prompt, tokens: int, *, speculate: bool = False) -> Said:
        """Whether it speculates is that server's business."""
        body = {"model": self._model, "prompt": prompt.text, "max_tokens": tokens,
                "temperature": 0, "stream": True}  # fmt: skip
        started_s, ttft_s, pieces = time.perf_counter(), 0.0, []
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0]["text"]:
                    ttft_s = ttft_s or time.perf_counter() - started_s
                    pieces.append(choices[0]["text"])
        total_s = time.perf_counter() - started_s
        return Said("".join(pieces), ttft_s, total_s, len(pieces))

    def restart(self) -> None:
        """Not ours to restart."""
        raise Absent("a server by URL is not restarted")

    def close(self) -> None:
        """Leave it running."""
        self._http.close()


class RakvService:
    """This service over HTTP, with its store on disk, for several peers that share nothing: each
    is a tenant."""

    def __init__(self, model: str, tenants: Sequence[str]) -> None:
        self.model = model
        made = {tenant: new_key(tenant, admin=False) for tenant in tenants}
        self.keys = {tenant: key for tenant, (key, _) in made.items()}
        self._folder = tempfile.TemporaryDirectory(prefix="rakv-peers-")
        self._path = Path(self._folder.name)
        table = KeyTable({entry.id: entry for _, entry in made.values()})
        write_table(self._path / "keys.yaml", table)
        self._up = ExitStack()
        self._start()

    def restart(self) -> None:
        """The whole service, in order."""
        self._up.close()
        self._start()

    def close(self) -> None:
        """Stop it and remove its store."""
        self._up.close()
        self._folder.cleanup()

    def _start(self) -> None:
        flags = {
            "model": self.model,
            "store-dir": str(self._path / "store"),
            "set": f"api_keys_file={self._path / 'keys.yaml'}",
        }
        log = self._path / "serve.log"
        self.url = self._up.enter_context(local_service(flags, log=log, clock=CLOCK)).base_url


class Rakv:
    """One tenant of the service; ``fields`` go with every request."""

    def __init__(self, service: RakvService, name: str, tenant: str, **fields: Any) -> None:
        self.name = name
        self.weights = f"{service.model}, float32"
        self._service, self._tenant, self._fields = service, tenant, fields

    def ask(self, prompt: Prompt, tokens: int, *, speculate: bool = False) -> Said:
        """As its users ask: the documents apart from the question."""
        key = self._service.keys[self._tenant]
        with Client(self._service.url, api_key=key, retries=NO_RETRIES, clock=CLOCK) as client:
            answer = client.chat(
                prompt.question,
                documents=prompt.documents,
                max_tokens=tokens,
                temperature=0,
                ignore_eos=True,
                speculation="auto" if speculate else "off",
                **self._fields,
            )
        order = tuple(answer.rakv["documents"]["ids"])
        return Said(answer.text, answer.ttft_s, answer.total_s, answer.output_tokens, order=order)

    def restart(self) -> None:
        """The service is restarted once for all its tenants, by whoever started it."""

    def close(self) -> None:
        """As :meth:`restart`."""


def together(peer: Peer, prompts: Sequence[Prompt], tokens: int) -> float:
    """Seconds until all of several requests that come at once are answered."""
    started_s = time.perf_counter()
    if isinstance(peer, (Transformers, KvBoost)):
        # One process, one model: whoever comes second waits.
        for prompt in prompts:
            peer.ask(prompt, tokens)
    else:
        threads = [threading.Thread(target=peer.ask, args=(p, tokens)) for p in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.perf_counter() - started_s


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def _cut(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        if layer.keys is not None:
            layer.keys = layer.keys[..., :tokens, :]
            layer.values = layer.values[..., :tokens, :]
