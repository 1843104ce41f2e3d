"""What goes into a replica's engine and what comes out, as plain picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field

from rakv_cluster.speculation.report import StepTrace
from rakv_cluster.speculation.speculator import SpeculationMode
from rakv_cluster.types import (
    BlendWish,
    ChunkedPrompt,
    FinishReason,
    ReuseMode,
    SamplingParams,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate (``n`` choices are ``n`` requests with other ``choice_index``).

    ``stop_token_ids`` end generation and are not part of the text (empty under ``ignore_eos``).
    ``stops`` are strings that end it where the text has come to one; its tokens are emitted, and
    with them those that were verified in the same step. To show no part of it is the reader's
    business.
    ``forced_ids`` were already sent to the client by a replica that died: they are prefilled as
    output, not emitted again. ``after`` is the id under which that replica had the request.
    ``timeout_s`` counts from submission. ``top_logprobs`` < 0 means that none are wanted.
    ``blend`` counts under ``ReuseMode.BLEND`` only.
    ``speculation`` changes how fast tokens come, never which. ``tenant`` and ``endpoint`` say whose
    and what sort of work it is. ``grammar``: what the output must follow, from
    :func:`~rakv_cluster.model.grammar.schema_grammar`; empty: nothing.
    ``trace_id`` is the id under which logs speak of it. Nobody waits for one in the ``background``:
    it gives way to others.
    """

    request_id: str
    prompt: ChunkedPrompt
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    reuse: ReuseMode = ReuseMode.EXACT
    blend: BlendWish = BlendWish()  # noqa: RUF009  # frozen
    top_logprobs: int = -1
    forced_ids: tuple[int, ...] = ()
    after: str = ""
    timeout_s: float = 600.0
    tenant: str = ""
    endpoint: str = ""
    speculation: SpeculationMode = "auto"
    grammar: str = ""
    trace_id: str = ""
    background: bool = False


@dataclass(frozen=True, slots=True)
class VerifiedBlocks:
    """``steps`` decode steps checked ``drafted`` tokens each, and ``accepted`` of them were right.

    Plain steps are those with ``drafted`` 0.
    """

    drafted: int
    accepted: int
    steps: int


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Where a request's prompt came from and where its time went.

    ``ram_tokens + disk_tokens + blended_tokens + computed_tokens`` equals the prompt's length;
    ``disk_tokens`` came from the disk of this node or, over the network, of another.
    ``blended_tokens`` were reused as computed behind other text, so the answer is approximate if
    there are any or ``repaired_tokens``: those that were reusable that way and computed again (part
    of ``computed_tokens``). ``expected_kl`` is what the model's calibration expects of that, nats
    per token, -1 if unknown; ``blend_refusal`` says why nothing was blended though it was asked
    for, and ``probed`` whether the question ran first to choose what was repaired.
    ``resumed_blend``: a replica that was lost blended, and the first output tokens are its.
    ``other_class_tokens`` of the reused ones came from replicas that round differently.
    Durations are on the engine's clock: ``queue_ms`` until the first work, ``load_ms`` in the
    store, ``prefill_ms`` from the first forward to the first token, ``decode_ms`` from there on.
    ``blocks`` are the steps behind the first token by drafts and acceptance; ``trace`` is each of
    them that could have drafted, where the request asked for it.
    ``text_drafts`` were found in the text so far, ``model_drafts`` made by a draft model.
    """

    prompt_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    blended_tokens: int = 0
    other_class_tokens: int = 0
    repaired_tokens: int = 0
    expected_kl: float = -1.0
    blend_refusal: str = ""
    probed: bool = False
    resumed_blend: bool = False
    computed_tokens: int = 0
    output_tokens: int = 0
    queue_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    blocks: tuple[VerifiedBlocks, ...] = ()
    trace: tuple[StepTrace, ...] = ()
    text_drafts: int = 0
    model_drafts: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.ram_tokens + self.disk_tokens + self.blended_tokens

    @property
    def approximate(self) -> bool:
        """Whether the answer may differ from full recompute."""
        return self.resumed_blend or self.blended_tokens + self.repaired_tokens > 0

    @property
    def steps_by_drafts(self) -> dict[int, int]:
        """Decode steps by number of drafts: the K histogram."""
        steps: dict[int, int] = {}
        for block in self.blocks:
            steps[block.drafted] = steps.get(block.drafted, 0) + block.steps
        return steps

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(block.accepted * block.steps for block in self.blocks)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of the drafts at each place of their block, from the first, that were accepted."""
        rates = []
        for place in range(max((block.drafted for block in self.blocks), default=0)):
            tried = [block for block in self.blocks if block.drafted > place]
            right = sum(block.steps for block in tried if block.accepted > place)
            rates.append(right / sum(block.steps for block in tried))
        return tuple(rates)


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """New tokens of one request, at most one event per step.

    ``finish`` is set on a request's last event, and ``stats`` on its first and last. A stop token
    that ended the request is not in ``token_ids``; ``stop_token_id`` carries it (-1 if none).
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int = -1
    stats: RequestStats | None = None
    error: str = ""
