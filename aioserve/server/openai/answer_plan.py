"""What a chat request wants its answer to be: text, a form, calls of tools if the model likes, or
calls that it must make.

A call that must be made is a form like any other, so it can't fail: the schema of a list of calls,
or of the arguments of the one function that was named. Knows how such answers are read again. Calls
that the model makes if it likes are the engine's to hold to their form, where tools are strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from aioserve.server.openai.chat_body import NamedTool, ResponseFormat, Tool
from aioserve.server.openai.fields import refuse
from aioserve.server.openai.limits import check_schema
from aioserve.server.sampling import StructuredOutputs
from aioserve.server.settings import ServerSettings
from aioserve.structured_output import StructuredOutput

__all__ = ["AnswerPlan", "plan_of"]


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask the engine, and how to read what it says."""

    form: StructuredOutput | None = None
    tools: list[dict[str, Any]] | None = None
    """That the model is told of."""
    reads_calls: bool = False
    """As the model writes them."""
    reads_list: bool = False
    """Of calls as JSON, which is all of the answer."""
    function: str | None = None
    """Whose arguments are all of the answer."""
    one_call: bool = False
    """The first is told, and no other."""
    strict: tuple[str, ...] = ()
    """Functions that the model calls if it likes, with arguments that have their form."""

    @property
    def tool_parser(self) -> Any:
        """Of `Engine.chat`."""
        return "json" if self.reads_list else "auto" if self.reads_calls else "none"

    @property
    def options(self) -> dict[str, Any]:
        """Of `Engine.chat`, beside those of every request."""
        options = {"tools": self.tools, "tool_parser": self.tool_parser}
        if self.strict:
            options |= {"strict_tools": self.strict, "parallel_tool_calls": not self.one_call}
        return options


def plan_of(
    settings: ServerSettings,
    *,
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool,
    one_call: bool,
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> AnswerPlan:
    """Raises `ApiError` for what contradicts itself."""
    form = _form(response_format, structured_outputs)
    if not tools:
        if choice not in ("none", "auto"):
            raise refuse("tool_choice", "names what must be called, and there are no tools")
        return AnswerPlan(form=form)
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise refuse("tools", "must have functions of different names")
    if choice == "none":
        return AnswerPlan(form=form)
    if form is not None:
        field = "response_format" if structured_outputs is None else "structured_outputs"
        raise refuse(
            field, "goes with tools only where tool_choice is none: an answer of that form is text"
        )
    told = [tool.told for tool in tools]
    if choice == "auto":
        return AnswerPlan(
            tools=told,
            reads_calls=True,
            one_call=one_call,
            strict=tuple([name for name, tool in by_name.items() if tool.function.strict]),
        )
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in by_name:
            raise refuse("tool_choice", f"names the function {name!r:.300}, which isn't in tools")
        schema = _parameters(by_name[name])
        check_schema("tools", schema, settings)
        return AnswerPlan(form=StructuredOutput(json_schema=schema), tools=told, function=name)
    schema = _calls(tools, one=one_call)
    check_schema("tools", schema, settings)
    return AnswerPlan(form=StructuredOutput(json_schema=schema), tools=told, reads_list=True)


def _form(
    wanted: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutput | None:
    """Of an answer of text."""
    if wanted is not None and wanted.type != "json_schema" and wanted.json_schema is not None:
        raise refuse("response_format.json_schema", "goes with the type json_schema alone")
    if wanted is None or wanted.type == "text":
        return None if structured_outputs is None else structured_outputs.form
    if structured_outputs is not None:
        raise refuse("structured_outputs", "and response_format ask for a form both")
    if wanted.type == "json_object":
        return StructuredOutput(json_object=True)
    if wanted.json_schema is None:
        raise refuse("response_format.json_schema", "is missing")
    return StructuredOutput(json_schema=wanted.json_schema.schema)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of an object."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise refuse("tools", f"must have parameters of type object, as {tool.function.name!r:.99}")
    return {"type": "object", **schema}


def _calls(tools: Sequence[Tool], *, one: bool) -> dict[str, Any]:
    """The schema of calls, in which each tool's own has a place of its own."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        place = f"tool{index}"
        definitions[place] = _moved(_parameters(tool), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    call: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
    if one:
        return {**call, "$defs": definitions}
    return {"type": "array", "items": call, "minItems": 1, "$defs": definitions}


_DATA = ("enum", "const", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
MAX_DEPTH = 64
"""Of a schema; the engine takes no more."""


def _moved(schema: Any, place: str, depth: int = 0) -> Any:
    """A schema whose references from its root lead from `place`."""
    if depth > 2 * MAX_DEPTH:
        raise refuse("tools", f"must have parameters nested at most {MAX_DEPTH} deep")
    if isinstance(schema, list):
        return [_moved(one, place, depth + 1) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[keyword] = place + value[1:]
        elif keyword in _DATA:
            moved[keyword] = value
        elif keyword in _BY_NAME and isinstance(value, dict):
            inner = {name: _moved(one, place, depth + 2) for name, one in value.items()}
            moved[keyword] = inner
        else:
            moved[keyword] = _moved(value, place, depth + 1)
    return moved
