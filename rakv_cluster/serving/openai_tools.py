"""What OpenAI's request bodies say of an answer's form: its schema, and the tools it may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import from_json

from rakv_cluster.errors import InvalidRequest


class Strict(BaseModel):
    """Base of all bodies. Strict: "5" is no number and true no integer, as at OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        """``null`` means "not given"; a name that no field has stays, to be refused."""
        if not isinstance(value, dict):
            return value
        return {
            n: given for n, given in value.items() if given is not None or n not in cls.model_fields
        }


class JsonSchemaIn(Strict):
    """A JSON Schema by name; ``strict`` changes nothing, since every schema is enforced."""

    name: str = Field("", max_length=64)
    description: str = Field("", max_length=4096)
    wanted: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Strict):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaIn | None = None

    @property
    def enforced(self) -> dict[str, Any] | None:
        """The schema that the text must follow; None if it is free."""
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.wanted if self.json_schema is not None else None


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class CalledFunction(Strict):
    """What an assistant's former message called; ``arguments`` is JSON text."""

    name: FunctionName
    arguments: str


class ToolCallIn(Strict):
    """A call in the history."""

    id: str = Field("", max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionIn(Strict):
    """A function that the model may call; ``strict`` changes nothing."""

    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class ToolIn(Strict):
    """One tool."""

    type: Literal["function"]
    function: FunctionIn


class Named(Strict):
    """A function by name."""

    name: FunctionName


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: Named


def _by_its_own_name(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Pydantic names the alternatives that it tried, which no client knows."""
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError("must be 'none', 'auto', 'required' or a function by name") from error


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool, WrapValidator(_by_its_own_name)
]


def offered(tools: Sequence[ToolIn], choice: ToolChoice) -> Sequence[ToolIn]:
    """The tools that the model is told of."""
    return [] if choice == "none" else tools


def demanded(tools: Sequence[ToolIn], choice: ToolChoice) -> Sequence[ToolIn]:
    """The tools one of which must be called; empty if the model is free.

    Raises :class:`InvalidRequest` if it must call one that is not there.
    """
    if choice in {"none", "auto"}:
        return []
    wanted = tools
    if isinstance(choice, NamedTool):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
    if not wanted:
        raise InvalidRequest("tool_choice names no tool that is there", field="tool_choice")
    return wanted


def check_names(tools: Sequence[ToolIn]) -> None:
    """Raise :class:`InvalidRequest` if two tools have one name."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", field="tools")


def check_calls(calls: Sequence[ToolCallIn], field: str) -> None:
    """Raise :class:`InvalidRequest` for arguments that are no JSON object."""
    for place, call in enumerate(calls):
        try:
            sound = isinstance(from_json(call.function.arguments), dict)
        except ValueError:
            sound = False
        if not sound:
            where = f"{field}.{place}.function.arguments"
            raise InvalidRequest("arguments must be the text of a JSON object", field=where)
