"""OpenAI's response bodies, plus the ``rakv`` object: what was reused, how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rakv_cluster.engine.request import RequestStats
from rakv_cluster.engine.text import TokenBytes
from rakv_cluster.errors import RakvError
from rakv_cluster.model.card import Exactness
from rakv_cluster.serving.documents import Placed
from rakv_cluster.serving.generation import TokenText, ToolCall, Update
from rakv_cluster.types import ReuseMode, TokenLogprob

Endpoint = Literal["chat", "completions"]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled_error",
}


def error_body(error: RakvError) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``."""
    status = error.http_status
    default = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(status, default),
            "param": error.field,
            "code": error.code,
        }
    }


@dataclass(frozen=True, slots=True)
class Header:
    """What all bodies of one response share."""

    endpoint: Endpoint
    id: str
    created: int
    model: str

    def chunk(self, choices: list[dict[str, Any]], **extra: object) -> dict[str, Any]:
        """A body around ``choices``; of a stream or not."""
        return {"id": self.id, "created": self.created, "model": self.model, "choices": choices} | (
            extra
        )


@dataclass(slots=True)
class Totals:
    """A response's accounts, gathered update by update."""

    prompt_tokens: int
    reuse: ReuseMode
    tokenize_ms: float
    exactness: Exactness
    placed: Placed = field(default_factory=Placed)
    output_tokens: dict[int, int] = field(default_factory=dict)
    stats: RequestStats = field(default_factory=RequestStats)
    ttft_ms: float = 0.0

    def add(self, update: Update, elapsed_ms: float) -> None:
        """Note one update, ``elapsed_ms`` after the request's arrival."""
        if not self.output_tokens:
            self.ttft_ms = elapsed_ms
        self.output_tokens[update.index] = update.output_tokens
        if update.index == 0:
            self.stats = update.stats

    def sources(self) -> dict[str, int]:
        """Tokens of the first choice's prompt by where their KV came from."""
        return {
            "ram": self.stats.ram_tokens,
            "disk": self.stats.disk_tokens,
            "blended": self.stats.blended_tokens,
            "computed": self.stats.computed_tokens,
        }

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``; the prompt counts once whatever ``n`` is."""
        output = sum(self.output_tokens.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": self.stats.cached_tokens},
        }

    def blend(self) -> dict[str, Any]:
        """Whether the answer is approximate, and if so, of what and by how much to expect."""
        stats = self.stats
        reused = stats.blended_tokens + stats.repaired_tokens
        return {
            "approximate": stats.approximate,
            "repaired_tokens": stats.repaired_tokens,
            "repaired_fraction": round(stats.repaired_tokens / reused, 4) if reused else 0.0,
            "expected_kl": round(stats.expected_kl, 5) if stats.expected_kl >= 0 else None,
            "refusal": stats.blend_refusal,
            "probed": stats.probed,
        }

    def label(self) -> str:
        """How exact the first choice is: as the model's numerics, unless its prompt's KV is not."""
        if self.stats.approximate:
            return "approximate"
        return "numerically equivalent" if self.stats.other_class_tokens else self.exactness

    def rakv(self, total_ms: float) -> dict[str, Any]:
        """Where the first choice's prompt came from, and where its time went (milliseconds)."""
        stats = self.stats
        return {
            "reuse": self.reuse.value,
            "exactness": self.label(),
            "tokens": self.sources(),
            "other_numeric_class_tokens": stats.other_class_tokens,
            "blend": self.blend(),
            "documents": {
                "order": self.placed.order,
                "indices": list(self.placed.indices),
                "ids": list(self.placed.ids),
            },
            "speculation": {
                "steps_by_drafts": {str(k): n for k, n in stats.steps_by_drafts.items()},
                "acceptance_by_position": [round(x, 4) for x in stats.acceptance_by_position],
                "accepted_tokens": stats.accepted_tokens,
                "drafts_by_source": {"text": stats.text_drafts, "model": stats.model_drafts},
                **({"trace": [asdict(step) for step in stats.trace]} if stats.trace else {}),
            },
            "timings_ms": {
                "tokenize": round(self.tokenize_ms, 3),
                "queue": round(stats.queue_ms, 3),
                "load": round(stats.load_ms, 3),
                "prefill": round(stats.prefill_ms, 3),
                "decode": round(stats.decode_ms, 3),
                "ttft": round(self.ttft_ms, 3),
                "total": round(total_ms, 3),
            },
        }


@dataclass(slots=True)
class ChoiceText:
    """One choice of a response that is not streamed, gathered update by update."""

    text: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, update: Update) -> None:
        """Append one update."""
        self.text.append(update.text)
        self.tokens += update.tokens
        self.calls += update.calls
        self.finish_reason = update.finish_reason


def full_body(
    header: Header,
    choices: Mapping[int, ChoiceText],
    token_bytes: TokenBytes,
    *,
    with_logprobs: bool,
    echo: str = "",
) -> dict[str, Any]:
    """The body of a response that is not streamed; usage is added by the caller."""
    bodies = []
    for index, choice in sorted(choices.items()):
        text = echo + "".join(choice.text)
        logprobs = _logprobs(header.endpoint, choice.tokens, token_bytes) if with_logprobs else None
        body: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        if header.endpoint == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                calls = [_call(header, index, n, call) for n, call in enumerate(choice.calls)]
                message |= {"content": text or None, "tool_calls": calls}
            body |= {"message": message}
        else:
            body |= {"text": text}
        bodies.append(body | {"logprobs": logprobs})
    return header.chunk(bodies, object=_object(header.endpoint, streamed=False))


def stream_body(
    header: Header,
    update: Update,
    token_bytes: TokenBytes,
    *,
    first: bool,
    with_logprobs: bool,
    echo: str = "",
    calls_before: int = 0,
) -> dict[str, Any]:
    """One chunk of a stream; a choice's ``first`` one carries the role or the echoed prompt.

    ``calls_before``: tool calls that the choice has sent already.
    """
    logprobs = _logprobs(header.endpoint, update.tokens, token_bytes) if with_logprobs else None
    body: dict[str, Any] = {"index": update.index, "finish_reason": update.finish_reason or None}
    if header.endpoint == "chat":
        role = {"role": "assistant"} if first else {}
        body |= {"delta": role | {"content": update.text}}
        if update.calls:
            numbered = enumerate(update.calls, start=calls_before)
            calls = [{"index": n, **_call(header, update.index, n, c)} for n, c in numbered]
            body["delta"]["tool_calls"] = calls
    else:
        body |= {"text": (echo if first else "") + update.text}
    body |= {"logprobs": logprobs}
    return header.chunk([body], object=_object(header.endpoint, streamed=True))


def _call(header: Header, choice: int, number: int, call: ToolCall) -> dict[str, Any]:
    """A tool call; its id is unique as the response's is."""
    return {
        "id": f"call_{header.id.rpartition('-')[2]}_{choice}_{number}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def usage_body(header: Header, totals: Totals, total_ms: float) -> dict[str, Any]:
    """The last chunk of a stream that was asked to include usage."""
    return header.chunk(
        [],
        object=_object(header.endpoint, streamed=True),
        usage=totals.usage(),
        rakv=totals.rakv(total_ms),
    )


def model_body(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """One entry of ``/v1/models``."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rakv-cluster",
        "max_model_len": context_tokens,
    }


def _object(endpoint: Endpoint, *, streamed: bool) -> str:
    if endpoint == "completions":
        return "text_completion"
    return "chat.completion.chunk" if streamed else "chat.completion"


def _logprobs(
    endpoint: Endpoint, tokens: Sequence[TokenText], token_bytes: TokenBytes
) -> dict[str, Any]:
    if endpoint == "chat":
        return {
            "content": [
                _chat_entry(token.logprob, token_bytes)
                | {"top_logprobs": [_chat_entry(t, token_bytes) for t in _top(token.logprob)]}
                for token in tokens
            ],
            "refusal": None,
        }
    return {
        "tokens": [_token_name(token.logprob.token_id, token_bytes) for token in tokens],
        "token_logprobs": [finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [
            {_token_name(t.token_id, token_bytes): finite(t.logprob) for t in _top(token.logprob)}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _token_name(token_id: int, token_bytes: TokenBytes) -> str:
    """A token's text; of one that is no whole text its bytes as OpenAI writes them, so that two
    parts of characters have two names."""
    raw = token_bytes.of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top(logprob: TokenLogprob) -> Iterable[TokenLogprob]:
    return (TokenLogprob(token_id, value) for token_id, value in logprob.top)


def _chat_entry(logprob: TokenLogprob, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes.of(logprob.token_id)
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": finite(logprob.logprob),
        "bytes": list(raw),
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is all but impossible."""
    return max(logprob, -9999.0)
