"""A validated request to engine requests, and back to updates: the ingress without its HTTP."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.keys import namespace
from rakv_cluster.chunking.ordering import canonical_order
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import Clock
from rakv_cluster.config import Settings
from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from rakv_cluster.logs import REQUEST_ID
from rakv_cluster.model.card import ModelCard
from rakv_cluster.model.grammar import lark_grammar, schema_grammar
from rakv_cluster.serving.auth import ANONYMOUS, Caller, Gate
from rakv_cluster.serving.backend import Backend
from rakv_cluster.serving.document_registry import Documents, DocumentsHere
from rakv_cluster.serving.documents import DocumentsOrder, Placed, SeenPrefixes, as_sent, reorder
from rakv_cluster.serving.generation import Choice, Update, run_choices
from rakv_cluster.serving.openai_models import (
    ChatRequest,
    CompletionRequest,
    DocumentIn,
    GenerationRequest,
    MessageIn,
)
from rakv_cluster.serving.openai_tools import CalledFunction, demanded, offered
from rakv_cluster.serving.prompting import PromptRenderer, Rendered, Segments
from rakv_cluster.serving.recent import RecentRequests
from rakv_cluster.serving.template import Document, Message
from rakv_cluster.serving.tool_calls import Tool, calls_lark
from rakv_cluster.serving.tracing import NO_TRACES, Tracer
from rakv_cluster.types import BlendWish, ChunkedPrompt, ReuseMode, SamplingParams

STORED = frozenset({ReuseMode.EXACT, ReuseMode.REORDER})
"""What these computed is stored under prefix keys."""

_INLINE_CHARACTERS = 4096
"""Shorter prompts are tokenized on the event loop: under a millisecond, less than a thread hop."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run; ``id`` begins the ids of its engine requests."""

    id: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    reuse: ReuseMode
    tokenize_ms: float
    placed: Placed


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's prompt, and in which order it has the documents."""

    prompt: ChunkedPrompt
    placed: Placed


class Service:
    """Prepares and runs requests against one model. One per ingress process."""

    def __init__(
        self,
        *,
        settings: Settings,
        backend: Backend,
        card: ModelCard,
        renderer: PromptRenderer,
        cuts: CutTable,
        clock: Clock,
        seeds: Random,
        documents: Callable[[int], Documents] = DocumentsHere,
        on_disk: Callable[[bytes], bool] = lambda _: False,
        tracer: Tracer = NO_TRACES,
        ended: Callable[[str, str, int], None] = lambda endpoint, tenant, output_tokens: None,
    ) -> None:
        """``documents`` makes the registry, of a budget in bytes for each tenant. ``on_disk`` says
        whether some node's disk is known to hold the KV under a key. ``ended`` hears of each choice
        that came to its end, or had begun when its client left: endpoint, tenant, tokens."""
        self.settings = settings
        self.backend = backend
        self.card = card
        self.clock = clock
        self.gate = Gate(settings, clock)
        self.documents = documents(int(settings.documents_budget_bytes))
        self.recent = RecentRequests()
        self.tracer = tracer
        self._renderer = renderer
        self._cuts = cuts
        self._seeds = seeds
        self._limits = ChunkLimits(settings.chunk_min_tokens, settings.chunk_max_tokens)
        self._seen = SeenPrefixes(on_disk)
        self._ended = ended
        self.token_bytes = renderer.token_bytes

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.settings.served_model_name or self.card.model_id

    def namespace(self, caller: Caller) -> bytes:
        """Where the KV of this caller's prompts is: the salt is the server's, never the client's,
        so that no tenant ever hits what another one stored."""
        return namespace(self.card.digest, caller.salt)

    async def prepare(
        self, request: GenerationRequest, caller: Caller = ANONYMOUS, *, endpoint: str = ""
    ) -> Prepared:
        """Render, tokenize, cut and check. Raises the 4xx classes of the error tree.

        ``endpoint`` is what sort of work it is, if not the one that its class says.
        """
        started_s = self.clock.monotonic_s()
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        self._check(request)
        request = await self._with_texts(request, caller)
        reuse = self._reuse(request)
        order, limit = _order(request, reuse), self.card.context_tokens
        asked = await self._asked(request, self.namespace(caller), order, limit_tokens=limit)
        prompt = asked.prompt
        tokenize_ms = (self.clock.monotonic_s() - started_s) * 1e3
        grammar = await _grammar(request)
        max_tokens = self._output_limit(request, len(prompt.token_ids), field)
        seed = self._seeds.getrandbits(63) if request.seed is None else request.seed % 2**63
        ends = frozenset() if request.ignore_eos else self.card.eos_token_ids
        longest_s = self.settings.request_timeout_s
        timeout_s = longest_s if request.timeout_s is None else min(request.timeout_s, longest_s)
        request_id = uuid.uuid4().hex
        choices = tuple(
            Choice(
                EngineRequest(
                    request_id=f"{request_id}-{index}",
                    prompt=prompt,
                    max_tokens=max_tokens,
                    sampling=_sampling(request, seed, index),
                    min_tokens=request.min_tokens,
                    stop_token_ids=ends | frozenset(request.stop_token_ids),
                    reuse=reuse,
                    blend=self._blend(request),
                    top_logprobs=request.alternatives,
                    timeout_s=timeout_s,
                    tenant=caller.tenant,
                    endpoint=endpoint or _endpoint(request),
                    speculation=request.speculation or self.settings.default_speculation,
                    grammar=grammar,
                    trace_id=REQUEST_ID.get(),
                    stops=tuple(request.stop),
                )
            )
            for index in range(request.n)
        )
        tokens = len(prompt.token_ids)
        return Prepared(request_id, choices, tokens, reuse, tokenize_ms, asked.placed)

    async def prompt(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> ChunkedPrompt:
        """A request's prompt alone, of any length; raises as :meth:`prepare` does."""
        self._check(request)
        request = await self._with_texts(request, caller)
        order = _order(request, self._reuse(request))
        return (await self._asked(request, self.namespace(caller), order)).prompt

    async def _with_texts(self, request: GenerationRequest, caller: Caller) -> GenerationRequest:
        """The request with the texts of documents that it names by id alone."""
        if all(document.text for document in request.documents):
            return request
        documents = list(request.documents)
        for index, document in enumerate(documents):
            if not document.text:
                field = f"documents.{index}.id"
                left = await self.documents.get(caller.tenant, document.id, field)
                documents[index] = DocumentIn(id=document.id, text=left.text)
        return request.model_copy(update={"documents": documents})

    def check_ids(self, token_ids: Iterable[int], field: str) -> None:
        """Raise :class:`InvalidRequest` for an id that the vocabulary does not have."""
        unknown = next((i for i in token_ids if i >= self.card.vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"token id {unknown} is not in the vocabulary (0 to {self.card.vocab_size - 1})",
                field=field,
            )

    async def run(self, prepared: Prepared) -> AsyncGenerator[Update, None]:
        """Updates of all choices; see :func:`run_choices`."""
        updates = run_choices(self.backend, prepared.choices, self.token_bytes, self.clock)
        async with aclosing(updates):
            asked = prepared.choices[0].request
            begun: dict[int, int] = {}
            try:
                async for update in updates:
                    if not begun and prepared.reuse in STORED:
                        self._seen.add([chunk.prefix_key for chunk in asked.prompt.chunks])
                    begun[update.index] = update.output_tokens
                    if update.finish_reason:
                        self._ended(asked.endpoint, asked.tenant, begun.pop(update.index))
                    yield update
            except (asyncio.CancelledError, GeneratorExit):
                for output_tokens in begun.values():
                    self._ended(asked.endpoint, asked.tenant, output_tokens)
                raise

    def _reuse(self, request: GenerationRequest) -> ReuseMode:
        reuse = ReuseMode(request.reuse) if request.reuse else self.settings.default_reuse
        for name in ("max_kl", "recompute"):
            if getattr(request, name) is not None and reuse is not ReuseMode.BLEND:
                raise InvalidRequest(f"{name} needs reuse: blend", field=name)
        return reuse

    def _blend(self, request: GenerationRequest) -> BlendWish:
        return BlendWish(
            request.max_kl or self.settings.default_max_kl,
            -1.0 if request.recompute is None else request.recompute,
        )

    def _check(self, request: GenerationRequest) -> None:
        if request.model and request.model not in {self.model_name, self.card.model_id}:
            raise ModelNotFound(
                f"the model '{request.model}' does not exist here; this server holds "
                f"'{self.model_name}'",
                field="model",
            )
        _at_most("n", request.n, self.settings.max_choices)
        _at_most("documents", len(request.documents), self.settings.max_documents)
        if isinstance(request, ChatRequest):
            _at_most("messages", len(request.messages), self.settings.max_messages)
            if not request.documents and not any(m.text.strip() for m in request.messages):
                raise InvalidRequest("the prompt is empty: no message has text", field="messages")
        elif isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
            self.check_ids(request.prompt, "prompt")
            if request.documents:
                raise InvalidRequest("documents need a prompt that is text", field="documents")
        self.check_ids((int(token_id) for token_id in request.logit_bias), "logit_bias")
        self.check_ids(request.stop_token_ids, "stop_token_ids")

    async def _asked(
        self,
        request: GenerationRequest,
        ns: bytes,
        order: DocumentsOrder,
        *,
        limit_tokens: int = 0,
    ) -> _Asked:
        documents = [Document(d.text, d.id) for d in request.documents]
        places = tuple(range(len(documents)))
        if order != "given":
            places = canonical_order([(d.id, d.text) for d in documents])
            documents = [documents[place] for place in places]
        characters = sum(len(document.text) for document in documents)
        if isinstance(request, ChatRequest):
            messages = [_message(message) for message in request.messages]
            tools = _tools_json(request)
            characters += sum(len(m.content + m.calls + m.name) for m in messages) + len(tools)

            def rendered() -> Rendered:
                return self._renderer.chat(messages, documents, limit_tokens, tools)
        elif isinstance(request, CompletionRequest):
            prompt = request.prompt
            characters += len(prompt)

            def rendered() -> Rendered:
                if isinstance(prompt, str):
                    return self._renderer.completion(prompt, documents, limit_tokens)
                return Rendered((prompt,))
        else:
            raise TypeError(f"no prompt in a {type(request).__name__}")

        def cut(segments: Segments) -> ChunkedPrompt:
            return chunk_prompt(ns, segments, self._cuts, self._limits)

        def asked() -> _Asked:
            try:
                whole = rendered()
            except InvalidRequest as error:
                # Of its own class: clients tell what is too long from what is wrong.
                raise type(error)(error.message, field=as_sent(error.field, places)) from error
            if order != "cached":
                return _Asked(cut(whole.segments), _placed(request, order, places))
            prompt, moved = reorder(whole, cut, self._seen.cached)
            now = tuple(places[place] for place in moved) or places
            return _Asked(prompt, _placed(request, order, now))

        if characters <= _INLINE_CHARACTERS:
            return asked()
        return await asyncio.to_thread(asked)

    def _output_limit(self, request: GenerationRequest, prompt_tokens: int, field: str) -> int:
        room = self.card.context_tokens - prompt_tokens
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty: it has no tokens", field=field)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens; with at least one for the answer the "
                f"model's context holds {self.card.context_tokens}",
                field=field,
            )
        if request.output_limit > room:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens and {request.output_limit_field} is "
                f"{request.output_limit}; together they exceed the model's context of "
                f"{self.card.context_tokens}",
                field=request.output_limit_field,
            )
        limit = request.output_limit or min(room, self.settings.default_max_tokens)
        if request.min_tokens > limit:
            raise InvalidRequest(
                f"min_tokens is larger than the output limit of {limit}", field="min_tokens"
            )
        return limit


def _endpoint(request: GenerationRequest) -> str:
    return "chat" if isinstance(request, ChatRequest) else "completions"


def _order(request: GenerationRequest, reuse: ReuseMode) -> DocumentsOrder:
    """``reorder`` says that the documents are a set; otherwise they stay as given unless asked."""
    return request.documents_order or ("cached" if reuse is ReuseMode.REORDER else "given")


def _placed(request: GenerationRequest, order: DocumentsOrder, indices: tuple[int, ...]) -> Placed:
    return Placed(order, indices, tuple(request.documents[index].id for index in indices))


async def _grammar(request: GenerationRequest) -> str:
    """What the text must follow; empty if it is free."""
    schema = request.response_format.enforced if request.response_format is not None else None
    # In a thread: hostile schemas take their time before they are refused.
    if schema is not None:
        return await asyncio.to_thread(schema_grammar, schema, "response_format.json_schema.schema")
    if isinstance(request, ChatRequest):
        tools = demanded(request.tools, request.tool_choice)
        if tools:
            callable_tools = [Tool(t.function.name, t.function.parameters) for t in tools]
            return await asyncio.to_thread(
                lambda: lark_grammar(calls_lark(callable_tools), "tools")
            )
    return ""


def _at_most(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequest(f"'{field}': at most {limit}, not {value}", field=field)


def _message(message: MessageIn) -> Message:
    if message.role == "developer":  # templates know it under its older name
        return Message("system", message.text, name=message.name)
    calls = [
        {"type": call.type, "function": _call_fields(call.function)} for call in message.tool_calls
    ]
    calls_json = json.dumps(calls, ensure_ascii=False) if calls else ""
    return Message(message.role, message.text, calls_json, message.name)


def _call_fields(called: CalledFunction) -> dict[str, Any]:
    # Templates write the arguments as JSON themselves.
    return {"name": called.name, "arguments": json.loads(called.arguments)}


def _tools_json(request: ChatRequest) -> str:
    """What the template is told of tools; empty: nothing."""
    tools = offered(request.tools, request.tool_choice)
    shown = [
        {
            "type": tool.type,
            "function": tool.function.model_dump(include={"name", "description", "parameters"}),
        }
        for tool in tools
    ]
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _sampling(request: GenerationRequest, seed: int, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        min_p=request.min_p,
        seed=seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={int(token_id): bias for token_id, bias in request.logit_bias.items()},
        choice_index=index,
    )
