"""What a chat request wants its answer to be: text, a form, calls of tools if the model likes, or
calls that it must make.

A call that must be made is a form like any other, so it can't fail: the schema of a list of calls,
or of the arguments of the one function that was named. Knows how such answers are read again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aioserve.server.errors import ApiError
from aioserve.server.openai.chat_body import ChatRequest, NamedTool, Tool
from aioserve.server.openai.fields import refuse
from aioserve.server.openai.limits import check_schema
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

    @property
    def tool_parser(self) -> Any:
        """Of `Engine.chat`."""
        return "json" if self.reads_list else "auto" if self.reads_calls else "none"


def plan_of(body: ChatRequest, settings: ServerSettings) -> AnswerPlan:
    """Raises `ApiError` for what contradicts itself."""
    form, choice = _form(body), body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "names what must be called, and there are no tools")
        return AnswerPlan(form=form)
    tools = {tool.function.name: tool for tool in body.tools}
    if len(tools) < len(body.tools):
        raise refuse("tools", "must have functions of different names")
    if choice == "none":
        return AnswerPlan(form=form)
    if form is not None:
        field = "structured_outputs" if body.structured_outputs is not None else "response_format"
        raise refuse(
            field, "goes with tools only where tool_choice is none: an answer of that form is text"
        )
    told = [tool.told for tool in body.tools]
    one_call = body.parallel_tool_calls is False
    if choice in (None, "auto"):
        _check_none_is_strict(body.tools)
        return AnswerPlan(tools=told, reads_calls=True, one_call=one_call)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in tools:
            raise refuse("tool_choice", f"names the function {name!r:.300}, which isn't in tools")
        schema = _parameters(tools[name])
        check_schema("tools", schema, settings)
        return AnswerPlan(form=StructuredOutput(json_schema=schema), tools=told, function=name)
    schema = _calls(body.tools, one=one_call)
    check_schema("tools", schema, settings)
    return AnswerPlan(form=StructuredOutput(json_schema=schema), tools=told, reads_list=True)


def _form(body: ChatRequest) -> StructuredOutput | None:
    """Of an answer of text."""
    wanted = body.response_format
    if wanted is not None and wanted.type != "json_schema" and wanted.json_schema is not None:
        raise refuse("response_format.json_schema", "goes with the type json_schema alone")
    if wanted is None or wanted.type == "text":
        return None if body.structured_outputs is None else body.structured_outputs.form
    if body.structured_outputs is not None:
        raise refuse("structured_outputs", "and response_format ask for a form both")
    if wanted.type == "json_object":
        return StructuredOutput(json_object=True)
    if wanted.json_schema is None:
        raise refuse("response_format.json_schema", "is missing")
    return StructuredOutput(json_schema=wanted.json_schema.schema)


def _check_none_is_strict(tools: list[Tool]) -> None:
    for index, tool in enumerate(tools):
        if tool.function.strict:
            field = f"tools[{index}].function.strict"
            raise ApiError(
                400,
                f"{field} isn't supported where the model may also answer with text, and writes "
                "calls as it likes: leave it out, or let tool_choice ask for a call, of any tool "
                "or of one by its name, whose arguments always have their form",
                param=field,
                code="unsupported_parameter",
            )


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of an object."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise refuse("tools", f"must have parameters of type object, as {tool.function.name!r:.99}")
    return {"type": "object", **schema}


def _calls(tools: list[Tool], *, one: bool) -> dict[str, Any]:
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
