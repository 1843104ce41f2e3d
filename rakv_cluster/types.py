"""Value types that every layer shares. Frozen; no behaviour beyond what their fields imply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class ReuseMode(str, Enum):
    """Which cached KV a request may use (DESIGN.md section 4)."""

    EXACT = "exact"
    REORDER = "reorder"  # exact, behind documents that are put in an order that is cached
    BLEND = "blend"  # approximate: equal text wherever it was computed, partly repaired
    OFF = "off"


class Tier(str, Enum):
    """Where reused KV came from: memory, this node's disk, another node's."""

    RAM = "ram"
    DISK = "disk"
    REMOTE = "remote"


class FinishReason(str, Enum):
    """Why a request ended, in OpenAI's terms where they exist."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    NO_MEMORY = "no_memory"  # what it needs is within the budget, but not there


@dataclass(frozen=True, slots=True)
class BlendWish:
    """How much a blended request may differ from full recompute.

    ``max_kl`` bounds the 95th percentile of the divergence (nats per token) that the model's
    calibration expects; ``recompute`` from 0 to 1 repairs that share of the reused tokens whatever
    it costs (below 0: not given). Without ``probe`` the question never runs first to see what it
    attends to. With a ``refusal`` nothing is blended, for that reason.
    """

    max_kl: float = 0.1
    recompute: float = -1.0
    probe: bool = True
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of prompt tokens that is stored and reused as one record.

    ``prefix_key`` names this chunk's KV behind everything that stands in front of it;
    ``content_key`` names the tokens alone.
    """

    start: int
    token_ids: tuple[int, ...]
    content_key: bytes
    prefix_key: bytes

    @property
    def end(self) -> int:
        """Position one past the chunk's last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A tokenized prompt and its cuts.

    ``chunks`` are contiguous from position 0. Tokens from ``tail_start`` on belong to no complete
    chunk yet (a later token may still extend them); ``tail_key`` names "whatever was last seen
    behind the last complete chunk", see :func:`rakv_cluster.chunking.keys.tail_key`.
    ``segment_start`` is where the last document or message begins: generated tokens continue
    its cuts.
    """

    namespace: bytes
    token_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    segment_start: int
    tail_key: bytes

    @property
    def tail_start(self) -> int:
        """Position of the first token outside every complete chunk."""
        return self.chunks[-1].end if self.chunks else 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How each token is chosen. Greedy is ``temperature == 0``.

    Units and ranges are OpenAI's; ``top_k == 0`` and ``min_p == 0`` switch those cuts off.
    ``seed`` is always concrete here: the ingress draws one when the client sent none, before the
    first dispatch, so that a retry on another replica continues the same text.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    choice_index: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        # A MappingProxyType default does not pickle; the bias crosses actors as a plain dict.
        return (
            SamplingParams,
            (
                self.temperature, self.top_p, self.top_k, self.min_p, self.seed,
                self.presence_penalty, self.frequency_penalty, self.repetition_penalty,
                dict(self.logit_bias), self.choice_index,
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token and of its likeliest alternatives, natural log."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
