"""Whether a request can run at all, decided before it is queued."""

from __future__ import annotations

import math

from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.errors import ContextLengthExceeded, InvalidRequest
from rakv_cluster.kv.buffer import BufferPool
from rakv_cluster.model.step import Runner


def check_request(request: EngineRequest, runner: Runner, pool: BufferPool) -> None:
    """Raise ``InvalidRequest`` (or ``ContextLengthExceeded``) naming the field that is wrong."""
    prompt = len(request.prompt.token_ids)
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if request.min_tokens < 0:
        raise InvalidRequest("min_tokens must not be negative", field="min_tokens")
    if not request.timeout_s > 0 or math.isnan(request.timeout_s):
        raise InvalidRequest("timeout_s must be positive", field="timeout_s")
    _check_ids(request.prompt.token_ids, runner.vocab_size, "prompt")
    _check_ids(request.forced_ids, runner.vocab_size, "forced_ids")
    if prompt >= runner.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens, the model's context holds {runner.context_tokens} "
            f"with the answer",
            field="prompt",
        )
    if prompt + request.max_tokens > runner.context_tokens:
        raise ContextLengthExceeded(
            f"{prompt} prompt tokens and max_tokens {request.max_tokens} exceed the context of "
            f"{runner.context_tokens} tokens",
            field="max_tokens",
        )
    if len(request.forced_ids) > request.max_tokens:
        raise InvalidRequest("more forced tokens than max_tokens", field="forced_ids")
    if pool.lease_bytes(prompt + request.max_tokens) > pool.budget_bytes:
        raise ContextLengthExceeded(
            f"{prompt} prompt tokens and max_tokens {request.max_tokens} need more KV memory than "
            f"this server has",
            field="max_tokens",
        )


def _check_ids(ids: tuple[int, ...], vocab_size: int, field: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"token ids must be in [0, {vocab_size})", field=field)
