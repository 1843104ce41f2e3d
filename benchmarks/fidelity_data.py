"""Prompts for benchmarks/fidelity.py: documents that recur in other orders, from three sources."""

from __future__ import annotations

import json
import pydoc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.common import shared_data
from benchmarks.corpus import STDLIB_MODULES
from rakv_cluster.reuse.calibrating import shuffled_prompt
from rakv_cluster.reuse.fidelity import FidelityPrompt, Ids
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.template import Document, Message

TUNED_ON = 40
"""Rows of MuSiQue on which the selectors were chosen: they are left out."""

SYSTEM = "You are a helpful assistant. Answer briefly from the documents."


@dataclass(frozen=True, slots=True)
class Asked:
    """Documents with names, a question about them, and its answer (may be empty)."""

    documents: tuple[tuple[str, str], ...]
    question: str
    answer: str = ""


def sources(
    documents: int, characters: int, folder: Path | None = None
) -> dict[str, Iterator[Asked]]:
    """Endless only as far as the data goes; shared data sets that are not there are left out."""
    found: dict[str, Iterator[Asked]] = {"manual pages": _manual(documents, characters)}
    folder = folder or shared_data()
    musique = folder / "musique" / "musique_dev.json"
    samples = folder / "bugloc-git" / "samples_dev.jsonl"
    if musique.exists():
        rows = json.loads(musique.read_text())[TUNED_ON:]
        found["MuSiQue"] = _musique(rows, documents, characters)
    if samples.exists():
        found["bug localization"] = _bugs(
            [json.loads(line) for line in samples.read_text().splitlines()],
            {
                row["blob"]: row["text"]
                for row in map(json.loads, (folder / "bugloc-git" / "files_dev.jsonl").open())
            },
            documents,
            characters,
        )
    return found


def prompts(
    asked: Iterator[Asked], count: int, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[FidelityPrompt]:
    """The first ``count``, rendered as a chat, with orders for the donors drawn from ``seed``.

    What asked about the donors is the next one's question.
    """
    renderer, rng = PromptRenderer(tokenizer), np.random.default_rng(seed)
    drawn = [one for one, _ in zip(asked, range(count), strict=False)]
    rendered = [
        renderer.chat(
            [Message("system", SYSTEM), Message("user", one.question)],
            [Document(text, name) for name, text in one.documents],
        )
        for one in drawn
    ]
    questions = [_joined(each.segments[each.documents[-1] + 1 :]) for each in rendered]
    made = []
    for index, (one, each) in enumerate(zip(drawn, rendered, strict=True)):
        first, last = each.documents[0], each.documents[-1]
        answer = tokenizer.encode(one.answer, add_special_tokens=False) if one.answer else []
        made.append(
            shuffled_prompt(
                _joined(each.segments[:first]),
                each.segments[first : last + 1],
                questions[index],
                rng,
                answer=tuple(answer),
                donor_question=questions[(index + 1) % len(questions)],
            )
        )
    return made


def _musique(rows: Sequence[dict[str, object]], documents: int, characters: int) -> Iterator[Asked]:
    """The passage that holds the answer is kept around it; the others from their start."""
    for row in rows:
        answers, passages = row["answers"], row["ctxs"]
        if not isinstance(answers, list) or not isinstance(passages, list):
            raise ValueError("a MuSiQue row has no answers or passages")
        answer = str(answers[0])
        texts = [str(passage["text"]) for passage in passages]
        texts.sort(key=lambda text: answer.lower() not in text.lower())
        kept = [_around(text, answer, characters) for text in texts[:documents]]
        named = tuple((str(index), text) for index, text in enumerate(kept))
        yield Asked(named[::-1], str(row["question"]), answer)


def _around(text: str, answer: str, characters: int) -> str:
    at = max(text.lower().find(answer.lower()), 0)
    start = max(0, min(at - characters // 2, len(text) - characters))
    return text[start : start + characters]


def _bugs(
    samples: Sequence[dict[str, object]],
    files: dict[str, str],
    documents: int,
    characters: int,
) -> Iterator[Asked]:
    for sample in samples:
        candidates, changed = sample["candidates"], sample["changed_files"]
        if not isinstance(candidates, list) or not isinstance(changed, list):
            raise ValueError("a bug sample has no candidates or no changed files")
        named = tuple(
            (str(each["path"]), files[str(each["blob"])][:characters])
            for each in candidates[:documents]
        )
        issue = str(sample["issue"])[:400]
        question = f"Which one of these files must be changed for this issue?\n{issue}"
        yield Asked(named, question, str(changed[0]))


def _manual(documents: int, characters: int) -> Iterator[Asked]:
    """Help texts of Python's standard library: each prompt has other modules."""
    for start in range(0, len(STDLIB_MODULES) - documents + 1, documents):
        names = STDLIB_MODULES[start : start + documents]
        texts = [pydoc.plain(pydoc.render_doc(name))[:characters] for name in names]
        question = f"What is {names[-1]} for?"
        yield Asked(tuple(zip(names, texts, strict=True)), question)


def _joined(segments: Sequence[Ids]) -> Ids:
    return tuple(token_id for segment in segments for token_id in segment)
