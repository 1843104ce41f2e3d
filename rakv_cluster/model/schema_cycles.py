"""References of a JSON Schema that lead in a circle which no text can end.

``{"$ref": "#"}`` allows no text at all; an object that must hold an object of its own kind, and so
on, none that is finite. The grammar library takes both, and is then left without a token to allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

_WITHOUT_END = frozenset({"object", "array"})
"""Types whose values may have to hold others; those of all other types are finite by themselves."""


def endless_reference(schema: Mapping[str, Any]) -> str:
    """The first ``$ref`` within reach that no finite text can follow; empty if there is none.

    Errs towards "there is none": of what else a schema demands nothing is looked at.
    """
    search = _Search(schema)
    search.run()
    return next((pointer for pointer, node in search.targets.items() if not node.ends), "")


class _Node:
    """A part of a schema: it has finite texts once ``missing`` more of its parts have some."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.ends = False
        self.parents: list[_Node] = []


class _Search:
    """Marks all parts that have finite texts, each once: time is linear in the schema's size."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.targets: dict[str, _Node] = {}
        self._schema = schema
        self._unread: list[tuple[_Node, Any]] = []
        self._ending: list[_Node] = []
        self._read_before: dict[int, _Node] = {}

    def run(self) -> None:
        self._read(self._schema)
        while self._unread:
            node, target = self._unread.pop()
            self._join(node, [self._read(target)])
        while self._ending:
            node = self._ending.pop()
            if node.ends:
                continue
            node.ends = True
            for parent in node.parents:
                parent.missing -= 1
                if not parent.missing:
                    self._ending.append(parent)

    def _all(self, parts: list[_Node]) -> _Node:
        return self._join(_Node(len(parts)), parts)

    def _any(self, parts: list[_Node]) -> _Node:
        return self._join(_Node(1 if parts else 0), parts)

    def _join(self, whole: _Node, parts: Iterable[_Node]) -> _Node:
        for part in parts:
            part.parents.append(whole)
        if not whole.missing:
            self._ending.append(whole)
        return whole

    def _read(self, schema: Any) -> _Node:
        if not isinstance(schema, dict):  # true and false: the library knows what to do
            return self._all([])
        if id(schema) not in self._read_before:
            self._read_before[id(schema)] = self._all(self._parts(schema))
        return self._read_before[id(schema)]

    def _parts(self, schema: dict[str, Any]) -> list[_Node]:
        """All that must have finite texts if ``schema`` is to have any."""
        parts = [self._read(each) for each in _listed(schema.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            parts.append(self._any([self._read(each) for each in _listed(schema.get(name))]))
        if isinstance(schema.get("$ref"), str):
            parts.append(self._target(schema["$ref"]))
        shapes = [self._object(schema), self._array(schema)]
        types = schema.get("type")
        known = {types} if isinstance(types, str) else {str(each) for each in _listed(types)}
        listed = "enum" in schema or "const" in schema
        if known and known <= _WITHOUT_END and not listed:
            wanted = [("object", shapes[0]), ("array", shapes[1])]
            parts.append(self._any([shape for name, shape in wanted if name in known]))
        return parts

    def _target(self, pointer: str) -> _Node:
        if pointer not in self.targets:
            self.targets[pointer] = _Node(1)
            self._unread.append((self.targets[pointer], _resolved(self._schema, pointer)))
        return self.targets[pointer]

    def _object(self, schema: dict[str, Any]) -> _Node:
        properties = {
            name: self._read(each) for name, each in _named(schema.get("properties")).items()
        }
        patterns = [self._read(each) for each in _named(schema.get("patternProperties")).values()]
        others = self._read(schema.get("additionalProperties"))
        required = [str(name) for name in _listed(schema.get("required"))]
        known = [properties[name] for name in required if name in properties]
        named_by_none = not patterns and any(name not in properties for name in required)
        return self._all([*known, others] if named_by_none else known)

    def _array(self, schema: dict[str, Any]) -> _Node:
        first = [self._read(each) for each in _listed(schema.get("prefixItems"))]
        others = self._read(schema.get("items"))
        least = schema.get("minItems")
        least = max(int(least), 0) if isinstance(least, int | float) else 0
        return self._all([*first[:least], others] if least > len(first) else first[:least])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _named(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _resolved(schema: Any, pointer: str) -> Any:
    """What a reference within the document names; ``True``, which allows all, for any other."""
    base, _, path = pointer.partition("#")
    if base or (path and not path.startswith("/")):
        return True
    for part in unquote(path).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return True
    return schema
