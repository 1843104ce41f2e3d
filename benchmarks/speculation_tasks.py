"""Prompts for benchmarks of speculation: Spec-Bench, chat, and code to edit or to copy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from benchmarks.speculation_texts import SPEC_BENCH, functions, prompts_by_category

CODE = ("edit", "copy")
CATEGORIES = (*SPEC_BENCH, "chat", *CODE)
CODE_OUTPUT_TOKENS = 192
"""Room for an answer of more than 128 tokens."""
PROMPT_TOKENS = 1_600
"""Longer prompts are left out."""

_CODE_TOKENS = range(140, 320)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt of one category, as token ids, and how long its answer may get."""

    category: str
    name: str
    ids: tuple[int, ...]
    max_tokens: int


def load_tasks(
    tokenizer: PreTrainedTokenizerFast,
    per_category: int,
    *,
    output_tokens: int,
    seed: int,
    categories: Sequence[str] = CATEGORIES,
    longest: int = PROMPT_TOKENS,
) -> list[Task]:
    """``per_category`` prompts of each category, drawn by ``seed``; categories alternate.

    None is of more than ``longest`` tokens.

    Raises ``ValueError`` if a category has too few.
    """
    chance = random.Random(seed)
    texts = prompts_by_category() | _code(tokenizer)
    columns = []
    for category in categories:
        pool = list(texts[category])
        chance.shuffle(pool)
        column = []
        for name, text in pool:
            ids = _chat_ids(tokenizer, text)
            if len(ids) <= longest:
                limit = CODE_OUTPUT_TOKENS if category in CODE else output_tokens
                column.append(Task(category, name, ids, limit))
            if len(column) == per_category:
                break
        if len(column) < per_category:
            raise ValueError(f"only {len(column)} prompts of category {category}")
        columns.append(column)
    return [column[index] for index in range(per_category) for column in columns]


def _chat_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    return tuple(encoded["input_ids"])


def _code(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[tuple[str, str]]]:
    """Functions of real projects, each with an edit to make or to be repeated as it is."""
    edits, copies = [], []
    for name, source in functions():
        if len(tokenizer(source, add_special_tokens=False)["input_ids"]) not in _CODE_TOKENS:
            continue
        old = name.rsplit(".", 1)[-1]
        fence = f"```python\n{source}\n```"
        edits.append(
            (name, f"Rename `{old}` to `new_{old}` in this code. Output all of it.\n\n{fence}")
        )
        copies.append((name, f"Repeat this code exactly as it is, nothing else.\n\n{fence}"))
    return {"edit": edits, "copy": copies}
