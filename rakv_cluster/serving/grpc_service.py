"""The gRPC services: messages in, messages out, every outcome an explicit status."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from grpc.aio import ServicerContext

from rakv_cluster.errors import InvalidRequest, RakvError
from rakv_cluster.logs import HEADER, begin_request
from rakv_cluster.rpc.calls import Method, methods
from rakv_cluster.rpc.status import DETAILS_KEY, details_of, message_of, status_code
from rakv_cluster.rpc.v1 import cache_pb2 as cache
from rakv_cluster.rpc.v1 import generation_pb2 as generation
from rakv_cluster.serving import grpc_messages as messages
from rakv_cluster.serving.auth import Caller, Gate, bearer
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.generation import Update
from rakv_cluster.serving.openai_format import ChoiceText
from rakv_cluster.serving.openai_models import ChatRequest
from rakv_cluster.serving.openai_tools import offered
from rakv_cluster.serving.route_api import Explains
from rakv_cluster.serving.run import Run
from rakv_cluster.serving.service import Service
from rakv_cluster.serving.tool_calls import split_calls
from rakv_cluster.telemetry import ServiceMetrics

log = logging.getLogger("rakv.grpc")

_INTERNAL = RakvError("internal error; the server's log says more")

_Context = ServicerContext[Any, Any]
_Unary = Callable[[Any, Caller], Awaitable[Message]]
_Streaming = Callable[[Any, Caller], AsyncGenerator[Message, None]]


class GrpcSurface:
    """What each method does; :meth:`handlers` is what a server registers."""

    def __init__(
        self,
        service: Service,
        metrics: ServiceMetrics,
        cache_api: CacheApi,
        replicas: Explains,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._cache = cache_api
        self._replicas = replicas

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """One handler per service of protos/rakv/v1."""
        unary: dict[str, _Unary] = {
            "Generate": self.generate,
            "ExplainRoute": self.explain_route,
            "Warm": self.warm,
            "Lookup": self.lookup,
            "Pin": self.pin,
            "Unpin": self.unpin,
            "Evict": self.evict,
            "Stats": self.stats,
        }
        streaming: dict[str, _Streaming] = {"GenerateStream": self.generate_stream}
        by_service: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        gate = self._service.gate
        for method in methods():
            handler = (
                _streaming_handler(method, streaming[method.name], gate)
                if method.streams
                else _unary_handler(method, unary[method.name], gate)
            )
            by_service.setdefault(method.service, {})[method.name] = handler
        return [
            grpc.method_handlers_generic_handler(name, handlers)
            for name, handlers in by_service.items()
        ]

    async def generate(
        self, request: generation.GenerateRequest, caller: Caller
    ) -> generation.GenerateResponse:
        """See protos/rakv/v1/generation.proto, as for the methods below."""
        run, started = await self._start(request, caller)
        choices = {choice.index: ChoiceText() for choice in run.prepared.choices}
        async with aclosing(started) as updates:
            async for update in updates:
                choices[update.index].add(update)
        return generation.GenerateResponse(
            id=run.prepared.id,
            model=self._service.model_name,
            choices=[
                messages.choice(
                    index,
                    "".join(choice.text),
                    choice.finish_reason,
                    messages.logprobs(choice.tokens, self._service.token_bytes),
                    messages.tool_calls(choice.calls, run.prepared.id, index),
                )
                for index, choice in sorted(choices.items())
            ],
            usage=messages.usage(run.totals, run.elapsed_ms()),
        )

    async def generate_stream(
        self, request: generation.GenerateRequest, caller: Caller
    ) -> AsyncGenerator[generation.GenerateStreamResponse, None]:
        run, started = await self._start(request, caller)
        called: Counter[int] = Counter()
        async with aclosing(started) as updates:
            async for update in updates:
                if update.text or update.tokens or update.calls or update.finish_reason:
                    index, before = update.index, called[update.index]
                    delta = messages.choice(
                        index,
                        update.text,
                        update.finish_reason,
                        messages.logprobs(update.tokens, self._service.token_bytes),
                        messages.tool_calls(update.calls, run.prepared.id, index, before=before),
                    )
                    called[index] += len(update.calls)
                    yield generation.GenerateStreamResponse(delta=delta)
        usage = messages.usage(run.totals, run.elapsed_ms())
        yield generation.GenerateStreamResponse(usage=usage)

    async def explain_route(
        self, request: generation.ExplainRouteRequest, caller: Caller
    ) -> generation.ExplainRouteResponse:
        asked = messages.generation_request(request.request)
        prepared = await self._service.prepare(asked, caller)
        decision = await self._replicas.explain(prepared.choices[0].request)
        return messages.explanation(prepared.prompt_tokens, decision)

    async def warm(self, request: cache.WarmRequest, caller: Caller) -> cache.WarmResponse:
        totals = await self._cache.warm(messages.prompt_request(request.input), caller)
        return cache.WarmResponse(usage=messages.usage(totals, totals.ttft_ms))

    async def lookup(self, request: cache.LookupRequest, caller: Caller) -> cache.LookupResponse:
        found = await self._cache.lookup(messages.prompt_request(request.input), caller)
        return messages.looked(found)

    async def pin(self, request: cache.PinRequest, caller: Caller) -> cache.PinResponse:
        prompt = messages.prompt_request(request.input)
        pinned = await self._cache.pin(prompt, caller, request.owner, request.ttl_s)
        return cache.PinResponse(
            pinned_chunks=pinned.pinned_chunks, prompt_chunks=pinned.prompt_chunks
        )

    async def unpin(self, request: cache.UnpinRequest, caller: Caller) -> cache.UnpinResponse:
        prompt = messages.prompt_request(request.input)
        ended = await self._cache.unpin(prompt, caller, request.owner)
        return cache.UnpinResponse(ended_pins=ended)

    async def evict(self, request: cache.EvictRequest, caller: Caller) -> cache.EvictResponse:
        removed = await self._cache.evict(messages.prompt_request(request.input), caller)
        return cache.EvictResponse(removed_records=removed)

    async def stats(self, request: cache.StatsRequest, caller: Caller) -> cache.StatsResponse:
        shards = await self._cache.shards(caller)
        return cache.StatsResponse(
            shards_by_node={node: messages.shard_stats(stats) for node, stats in shards.items()},
            replica=messages.one_replica(await self._cache.replicas(caller)),
        )

    async def _start(
        self, request: generation.GenerateRequest, caller: Caller
    ) -> tuple[Run, AsyncGenerator[Update, None]]:
        """A request's run and its updates, calls of tools taken out of the text."""
        started_s = self._service.clock.monotonic_s()
        asked = messages.generation_request(request)
        prepared = await self._service.prepare(asked, caller)
        run = Run(
            self._service, self._metrics, prepared, caller, endpoint="grpc", started_s=started_s
        )
        tools = isinstance(asked, ChatRequest) and offered(asked.tools, asked.tool_choice)
        return run, split_calls(run.updates()) if tools else run.updates()


def _unary_handler(
    method: Method, implementation: _Unary, gate: Gate
) -> grpc.RpcMethodHandler[Any, Any]:
    async def call(raw: bytes, context: _Context) -> bytes:
        await _begin(context)
        try:
            caller = await gate.authenticate(_key(context))
            with gate.admit(caller):
                response = await implementation(_decoded(method, raw), caller)
                return bytes(response.SerializeToString())
        except RakvError as error:
            return await _abort(context, error)
        except Exception:
            log.exception("%s failed", method.path)
            return await _abort(context, _INTERNAL)

    return grpc.unary_unary_rpc_method_handler(call)


def _streaming_handler(
    method: Method, implementation: _Streaming, gate: Gate
) -> grpc.RpcMethodHandler[Any, Any]:
    async def call(raw: bytes, context: _Context) -> AsyncIterator[bytes]:
        await _begin(context)
        try:
            caller = await gate.authenticate(_key(context))
            with gate.admit(caller):
                async with aclosing(implementation(_decoded(method, raw), caller)) as responses:
                    async for response in responses:
                        yield response.SerializeToString()
        except RakvError as error:
            await _abort(context, error)
        except Exception:
            log.exception("%s failed", method.path)
            await _abort(context, _INTERNAL)

    return grpc.unary_stream_rpc_method_handler(call)


async def _begin(context: _Context) -> None:
    """Give the call its id, and tell the client."""
    request_id = begin_request(_metadata(context, HEADER))
    await context.send_initial_metadata(((HEADER, request_id),))


def _key(context: _Context) -> str:
    return bearer(_metadata(context, "authorization"))


def _metadata(context: _Context, wanted: str) -> str:
    """The first text under this name; empty if there is none."""
    for name, value in context.invocation_metadata() or ():
        if name == wanted and isinstance(value, str):
            return value
    return ""


def _decoded(method: Method, raw: bytes) -> Message:
    # Decoded here instead of by grpc, which answers INTERNAL to bytes that are no message.
    request = method.request()
    try:
        request.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"not a {request.DESCRIPTOR.full_name}: {error}") from error
    return request


async def _abort(context: _Context, error: RakvError) -> NoReturn:
    """End the call with the error's status."""
    await context.abort(
        status_code(error), message_of(error), trailing_metadata=((DETAILS_KEY, details_of(error)),)
    )
