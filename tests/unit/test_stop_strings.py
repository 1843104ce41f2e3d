"""A request whose text has come to a stop string ends there, with the whole account of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.engine.engine import Engine
from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.engine.text import TokenBytes
from rakv_cluster.errors import InvalidRequest
from rakv_cluster.speculation.speculator import SpeculationMode
from rakv_cluster.testing.engine import LIMITS, NAMESPACE, bare_engine, no_cuts
from rakv_cluster.testing.fake_runner import FakeRunner
from rakv_cluster.types import FinishReason

DEADLINE_S = 20.0
PROMPT = [3, 5, 8, 13]
LETTERS = [chr(ord("0") + index) for index in range(64)]
IDS = FakeRunner().generate(PROMPT, 40)
TEXT = "".join(LETTERS[token_id] for token_id in IDS)
STOP = TEXT[20:23]


class Answer:
    """A sink that another thread waits on."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._done = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if event.finish is not None:
            self._done.set()

    def last(self) -> EngineEvent:
        assert self._done.wait(DEADLINE_S)
        return self.events[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.token_ids]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = bare_engine(
        FakeRunner(), token_bytes=TokenBytes([letter.encode() for letter in LETTERS])
    )
    engine.start(calibrate=False)
    yield engine
    engine.stop(timeout_s=1.0)


def ask(engine: Engine, **fields: Any) -> Answer:
    answer = Answer()
    prompt = chunk_prompt(NAMESPACE, [PROMPT], no_cuts(64), LIMITS)
    engine.submit(EngineRequest("r", prompt, len(IDS), **fields), answer)
    return answer


def test_it_ends_with_the_token_that_completes_one(engine: Engine) -> None:
    assert TEXT.find(STOP) == 20

    answer = ask(engine, stops=("never", STOP))
    last = answer.last()

    assert answer.token_ids == IDS[:23]
    assert last.finish is FinishReason.STOP
    assert last.stats is not None
    assert last.stats.output_tokens == 23
    assert [event.stats is None for event in answer.events] == [False, *[True] * 21, False]
    assert engine.stats().counters.finished == {"stop": 1}


@pytest.mark.parametrize("speculation", ["1", "8"])
def test_drafts_that_were_right_may_stand_behind_it(
    engine: Engine, speculation: SpeculationMode
) -> None:
    answer = ask(engine, stops=(STOP,), speculation=speculation)

    assert answer.last().finish is FinishReason.STOP
    assert answer.token_ids == IDS[: len(answer.token_ids)]
    assert 23 <= len(answer.token_ids) < 23 + 1 + int(speculation)


def test_one_in_the_first_tokens_is_none(engine: Engine) -> None:
    answer = ask(engine, stops=(STOP,), min_tokens=23)

    assert answer.last().finish is FinishReason.LENGTH
    assert answer.token_ids == IDS


def test_one_may_begin_in_what_another_replica_made(engine: Engine) -> None:
    answer = ask(engine, stops=(STOP,), forced_ids=tuple(IDS[:21]))

    assert answer.last().finish is FinishReason.STOP
    assert answer.token_ids == IDS[21:23]


def test_a_text_that_has_ended_is_not_continued(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="forced"):
        ask(engine, stops=(STOP,), forced_ids=tuple(IDS[:23]))
