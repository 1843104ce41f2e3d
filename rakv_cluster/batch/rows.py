"""What a job asks: prompts times documents, each combination one row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

from rakv_cluster.batch.planner import Plan, plan
from rakv_cluster.errors import ConfigError

_FIELDS = frozenset({"id", "prompt", "documents"})
_MOST_ROWS = 10_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One request: ``question`` is the user's message about ``documents``, by name."""

    id: str
    question: str
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """All rows in the order of the input, and what they have in common.

    ``documents`` are texts by name. ``options`` are fields of the HTTP surface.
    """

    rows: tuple[Row, ...]
    documents: Mapping[str, str]
    system: str
    options: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of everything that the results depend on but the model."""
        texts = {name: sha256(text.encode()).hexdigest() for name, text in self.documents.items()}
        whole = sha256(json.dumps([self.system, dict(self.options), texts]).encode())
        for row in self.rows:
            whole.update(json.dumps(asdict(row)).encode())
        return whole.hexdigest()

    def plan(self) -> Plan:
        """The order that reuses most; in characters, which tokens are proportional to."""
        prompts = [self._segments(row) for row in self.rows]
        return plan(prompts, lambda segment: self._characters(str(segment)))

    def _segments(self, row: Row) -> tuple[str, ...]:
        return (f"s{self.system}", *(f"d{name}" for name in row.documents), f"q{row.question}")

    def _characters(self, segment: str) -> int:
        text = segment[1:]
        return len(self.documents[text]) if segment[0] == "d" else len(text)


def read_rows(
    path: Path, documents: Mapping[str, str], template: str = "$prompt"
) -> tuple[Row, ...]:
    """The rows of a prompts file.

    ``.jsonl``: an object per line with ``prompt``, optional ``id`` and ``documents`` (names; they
    stand in front of the question in this order). Any other name: a prompt per line, blank lines
    left out. A prompt that names no documents is asked about every document on its own.
    ``template`` is the question's text around ``$prompt``; ``$document`` is the names it is about.

    Raises :class:`ConfigError` that names the line.
    """
    question = _template(template)
    rows: list[Row] = []
    for number, entry in _entries(path):
        where = f"{path}, line {number}"
        for row in _expanded(entry, number, documents, question, where):
            rows.append(row)
            if len(rows) > _MOST_ROWS:
                raise ConfigError(f"more than {_MOST_ROWS} rows", field="prompts")
    if not rows:
        raise ConfigError(f"no prompt in {path}", field="prompts")
    repeated = _first_repeated([row.id for row in rows])
    if repeated:
        raise ConfigError(f"two rows have the id '{repeated}'", field="prompts")
    return tuple(rows)


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="prompts") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield number, {"prompt": line.strip()}
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}: not JSON: {error}", field="prompts"
            ) from error
        if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
            raise ConfigError(
                f"{path}, line {number}: an object with prompt, id and documents alone",
                field="prompts",
            )
        yield number, entry


def _expanded(
    entry: dict[str, Any],
    number: int,
    documents: Mapping[str, str],
    question: Template,
    where: str,
) -> Iterator[Row]:
    prompt, name, named = entry.get("prompt"), entry.get("id", ""), entry.get("documents")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where}: prompt must be a text", field="prompts")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: id must be a text", field="prompts")
    try:
        (prompt + name).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: not Unicode: {error}", field="prompts") from error
    row_id = name or str(number)
    if named is None and documents:
        for document in documents:
            yield Row(f"{row_id}/{document}", _asked(question, prompt, (document,)), (document,))
        return
    chosen = _names(named or [], documents, where)
    yield Row(row_id, _asked(question, prompt, chosen), chosen)


def _names(named: object, documents: Mapping[str, str], where: str) -> tuple[str, ...]:
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{where}: documents must be a list of names", field="prompts")
    for name in named:
        if name not in documents:
            raise ConfigError(f"{where}: no document '{name}'", field="prompts")
    return tuple(named)


def _template(text: str) -> Template:
    template = Template(text)
    try:
        template.substitute(prompt="", document="")
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "the template knows $prompt and $document; write $$ for a dollar", field="template"
        ) from error
    return template


def _asked(question: Template, prompt: str, documents: Sequence[str]) -> str:
    return question.substitute(prompt=prompt, document=", ".join(documents))


def _first_repeated(names: Sequence[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""
