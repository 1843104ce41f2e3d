"""The job of benchmarks/batch.py: what a retriever's candidates are judged by.

Two kinds, as in an index over prose and code: open-domain questions (MuSiQue's, and Spec-Bench's of
question answering and retrieval) about passages of MuSiQue, and issues of Python projects about
files of these projects. Without the shared data: questions about help texts of Python's standard
library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common import shared_data
from benchmarks.corpus import QUESTION_TEMPLATES, STDLIB_MODULES, load_corpus, trimmed
from benchmarks.speculation_texts import prompts_by_category
from rakv_cluster.batch.rows import Job, Row

DOCUMENT_TOKENS = 500
PASSAGES, FILES = 40, 15
_MODULES = 60
_ISSUE_CHARACTERS = 400
_ANSWERS = "Does the text help to answer the question below? Answer yes or no.\n\n{question}"
_CLOSES = "Must this file be changed to close the issue below? Answer yes or no.\n\n{question}"

CountTokens = Callable[[str], int]


def load_job(
    options: Mapping[str, Any], random: Random, count_tokens: CountTokens, share: float
) -> tuple[Job, str]:
    """The job and where its texts are from; ``share`` of the documents and of the questions.

    Each of MuSiQue's questions is asked of two passages that are drawn for it, each other question
    of one document. Raises ``ValueError`` if a source has too few documents that are long enough.
    """
    corpus = load_corpus(1, round(PASSAGES * share), DOCUMENT_TOKENS, count_tokens=count_tokens)
    passages = {f"p{i}": text for i, text in enumerate(corpus.sets[0].documents)}
    shared = shared_data()
    if not shared.exists():
        names = STDLIB_MODULES[: round(_MODULES * share)]
        questions = [each.format(name=name) for each in QUESTION_TEMPLATES for name in names]
        asked = _asked(_ANSWERS, questions, 1, passages, random)
        return _job(asked, passages, options), corpus.origin
    wanted = round(FILES * share)
    files = dict(trimmed(_files(shared), wanted, DOCUMENT_TOKENS, count_tokens))
    musique, others, issues = (
        questions[: round(len(questions) * share)]
        for questions in (_musique(shared), _spec_bench(), _issues(shared))
    )
    pairs = [
        *_asked(_ANSWERS, musique, 2, passages, random),
        *_asked(_ANSWERS, others, 1, passages, random),
        *_asked(_CLOSES, issues, 1, files, random),
    ]
    origin = f"{len(passages)} passages of MuSiQue and {len(files)} source files ({shared})"
    return _job(pairs, {**passages, **files}, options), origin


def _asked(
    prompt: str, questions: Sequence[str], candidates: int, names: Iterable[str], random: Random
) -> Iterator[tuple[str, str]]:
    """``(question, document)``: every question about the documents that are drawn for it."""
    names = sorted(names)
    for question in questions:
        for name in random.sample(names, candidates):
            yield prompt.format(question=question), name


def _job(
    asked: Iterable[tuple[str, str]], documents: Mapping[str, str], options: Mapping[str, Any]
) -> Job:
    rows = (Row(str(i), question, (name,)) for i, (question, name) in enumerate(asked))
    return Job(tuple(rows), documents, "", options)


def _musique(shared: Path) -> list[str]:
    rows = json.loads((shared / "musique" / "musique_dev.json").read_text())
    return list(dict.fromkeys(str(row["question"]) for row in rows))


def _spec_bench() -> list[str]:
    """Without the passages that Spec-Bench's retrieval puts before a question, on its last line."""
    prompts = prompts_by_category()
    asked = [text for category in ("qa", "rag") for _, text in prompts[category]]
    return list(dict.fromkeys(text.strip().splitlines()[-1] for text in asked))


def _issues(shared: Path) -> list[str]:
    rows = _lines(shared / "bugloc-git" / "samples_dev.jsonl")
    return list(dict.fromkeys(str(row["issue"])[:_ISSUE_CHARACTERS] for row in rows))


def _files(shared: Path) -> Iterator[tuple[str, str]]:
    """``(path, text)``, one version of each file."""
    seen: set[str] = set()
    for row in _lines(shared / "bugloc-git" / "files_dev.jsonl"):
        if row["path"] not in seen:
            seen.add(row["path"])
            yield row["path"], row["text"]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
