"""Texts for benchmarks of speculation: shared data where present, else installed sources."""

from __future__ import annotations

import ast
import importlib.util
import json
import pydoc
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common import shared_data
from benchmarks.corpus import QUESTION_TEMPLATES, STDLIB_MODULES

SPEC_BENCH = ("summarization", "rag", "qa", "translation", "math_reasoning")
_HELP_CHARACTERS = 2_000

Named = tuple[str, str]
"""A text and what it is called."""


def origin() -> str:
    """Where the texts are from, for a benchmark's header."""
    folder = shared_data()
    if folder.exists():
        return f"Spec-Bench and functions of Python projects ({folder})"
    return "help texts and functions of Python's standard library"


def prompts_by_category() -> dict[str, list[Named]]:
    """Prompts of each of ``SPEC_BENCH``; what is of none of these is chat."""
    path = shared_data() / "spec-bench" / "question_dev.jsonl"
    if not path.exists():
        return {name: list(_about_modules(name)) for name in (*SPEC_BENCH, "chat")}
    texts: dict[str, list[Named]] = {name: [] for name in (*SPEC_BENCH, "chat")}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        category = row["category"] if row["category"] in texts else "chat"
        texts[category].append((f"spec-bench {row['question_id']}", row["turns"][0]))
    return texts


def functions() -> Iterator[Named]:
    """``(qualified name, source)`` of top-level functions, each once."""
    path = shared_data() / "bugloc-git" / "files_dev.jsonl"
    if path.exists():
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        files: Iterable[Named] = ((row["path"], row["text"]) for row in rows)
    else:
        files = _standard_library()
    seen: set[str] = set()
    for where, text in files:
        for name, source in _functions_of(where, text):
            if name not in seen:
                seen.add(name)
                yield name, source


def _functions_of(path: str, text: str) -> Iterator[Named]:
    if not path.endswith(".py"):
        return
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # syntax of another Python version
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield f"{path}.{node.name}", ast.get_source_segment(text, node) or ""


def _standard_library() -> Iterator[Named]:
    for name in STDLIB_MODULES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and spec.origin.endswith(".py"):
            yield spec.origin, Path(spec.origin).read_text(encoding="utf-8")


def _about_modules(category: str) -> Iterator[Named]:
    """Prompts like those of the category, about modules of the standard library."""
    for number, name in enumerate(STDLIB_MODULES):
        text = pydoc.plain(pydoc.render_doc(name))[:_HELP_CHARACTERS]
        question = QUESTION_TEMPLATES[number % len(QUESTION_TEMPLATES)].format(name=name)
        prompt = {
            "summarization": f"Summarize this text in three sentences.\n\n{text}",
            "rag": f"{text}\n\n{question}",
            "qa": question,
            "translation": f"Translate to French: {text.splitlines()[0]}",
            "math_reasoning": f"A module has {number + 3} functions; {number // 2} are removed and "
            f"{number % 7} added. How many does it have now? Think step by step.",
            "chat": f"Write a short story about a programmer who has never used {name} before.",
        }[category]
        yield f"{category} {name}", prompt
