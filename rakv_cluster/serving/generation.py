"""One choice of a request: engine events to text, stop strings, log-probabilities, an end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from rakv_cluster.clock import Clock
from rakv_cluster.engine.request import EngineEvent, EngineRequest, RequestStats
from rakv_cluster.engine.text import TextStream, TokenBytes
from rakv_cluster.errors import DeadlineExceeded, RakvError, RequestCancelled, Unavailable
from rakv_cluster.serving.backend import Backend
from rakv_cluster.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the texts to generate."""

    request: EngineRequest

    @property
    def index(self) -> int:
        """Its number among the request's choices."""
        return self.request.sampling.choice_index

    def within(self, timeout_s: float) -> Choice:
        """The same with another limit on its time."""
        return replace(self, request=replace(self.request, timeout_s=timeout_s))


@dataclass(frozen=True, slots=True)
class TokenText:
    """An emitted token with its log-probabilities; ``offset`` is where its text starts, in
    characters of the choice's text."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Update:
    """A choice's next piece; ``finish_reason`` is ``stop`` or ``length`` on its last one.
    ``calls`` are empty but behind :func:`~rakv_cluster.serving.tool_calls.split_calls`.

    ``output_tokens`` counts the tokens so far. ``stats`` is the engine's latest account; where a
    stop string ended the text, tokens behind it may be in it.
    """

    index: int
    text: str
    output_tokens: int
    tokens: tuple[TokenText, ...] = ()
    finish_reason: str = ""
    stats: RequestStats = field(default_factory=RequestStats)
    calls: tuple[ToolCall, ...] = ()


async def run_choice(
    backend: Backend, choice: Choice, token_bytes: TokenBytes
) -> AsyncGenerator[Update, None]:
    """Updates of one choice, one per engine event. Closing it cancels the engine's work.

    Raises what the backend raises, and :class:`DeadlineExceeded`, :class:`RequestCancelled` or
    :class:`Unavailable` (no memory) when the engine ended the request for that.
    """
    request = choice.request
    text = TextStream(token_bytes, stops=request.stops, min_tokens=request.min_tokens)
    window = _LogprobWindow()
    output_tokens = 0
    stats = RequestStats()
    async with aclosing(backend.generate(request)) as events:
        async for event in events:
            stats = event.stats or stats
            delta = text.push(event.token_ids)
            output_tokens += delta.consumed
            shown, stop = delta.text, delta.stop
            if event.finish is not None and not stop:
                _check_finish(event)
                rest = text.finish()
                shown, stop = shown + rest.text, rest.stop
            ended = bool(stop) or event.finish is not None
            window.add(event.logprobs, delta.ends)
            yield Update(
                index=choice.index,
                text=shown,
                output_tokens=output_tokens,
                tokens=window.release(len(shown), ended=ended),
                finish_reason=_finish_reason(event, stop) if ended else "",
                stats=stats,
            )
            if ended:
                return
    raise RakvError("the engine ended a request without saying why")


async def run_choices(
    backend: Backend, choices: Sequence[Choice], token_bytes: TokenBytes, clock: Clock
) -> AsyncGenerator[Update, None]:
    """Updates of all choices as they come.

    The first choice goes ahead; the others start with its first token, when the prompt's KV is
    there to share, and have what is left of its time. The first error ends them all, and so does
    closing the generator.
    """
    if len(choices) == 1:
        async with aclosing(run_choice(backend, choices[0], token_bytes)) as updates:
            async for update in updates:
                yield update
        return
    until_s = clock.monotonic_s() + choices[0].request.timeout_s
    merged: asyncio.Queue[Update | Exception] = asyncio.Queue(maxsize=4 * len(choices))

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(run_choice(backend, choice, token_bytes)) as updates:
                async for update in updates:
                    await merged.put(update)
        except Exception as error:  # noqa: BLE001  # raised where the updates are awaited
            await merged.put(error)

    tasks = [asyncio.create_task(pump(choices[0]))]
    open_choices = len(choices)
    try:
        while open_choices:
            item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if len(tasks) == 1:
                left_s = until_s - clock.monotonic_s()
                tasks += [asyncio.create_task(pump(each.within(left_s))) for each in choices[1:]]
            open_choices -= bool(item.finish_reason)
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_finish(event: EngineEvent) -> None:
    if event.finish is FinishReason.ERROR:
        raise RakvError(event.error or "the engine failed on this request")
    if event.finish is FinishReason.NO_MEMORY:
        raise Unavailable("the replica has no memory for this request's KV now", retry_after_s=1.0)
    if event.finish is FinishReason.DEADLINE:
        raise DeadlineExceeded("the request's time ran out")
    if event.finish is FinishReason.CANCELLED:
        raise RequestCancelled("the request was cancelled")


def _finish_reason(event: EngineEvent, stop: str) -> str:
    return "stop" if stop or event.finish is FinishReason.STOP else "length"


class _LogprobWindow:
    """Holds tokens back until all their text is shown, so that log-probabilities show no more of
    a stop string than the text does. At the end, tokens that begin in the shown text are shown."""

    def __init__(self) -> None:
        self._held: deque[tuple[TokenText, int]] = deque()
        self._last_end = 0
        self._shown = 0

    def add(self, logprobs: Sequence[TokenLogprob], ends: Sequence[int]) -> None:
        """Take new tokens; ``ends`` are :attr:`TextDelta.ends`."""
        for logprob, end in zip(logprobs, ends, strict=False):
            self._held.append((TokenText(logprob, self._last_end), end))
            self._last_end = end

    def release(self, shown: int, *, ended: bool) -> tuple[TokenText, ...]:
        """Tokens to show now that ``shown`` more characters are; the last call says ``ended``."""
        self._shown += shown
        released: list[TokenText] = []
        while self._held:
            token, end = self._held[0]
            if end > self._shown and not (ended and token.offset < self._shown):
                break
            released.append(token)
            self._held.popleft()
        return tuple(released)
