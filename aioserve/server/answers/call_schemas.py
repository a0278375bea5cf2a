"""The schemas of calls that an answer must be: each tool's own, and those of all tools in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioserve.server.answers.forms import Tool
from aioserve.server.errors import refuse

__all__ = ["calls_schema", "parameters_of"]


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of an object."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise refuse("tools", f"must have parameters of type object, as {tool.function.name!r:.99}")
    return {"type": "object", **schema}


def calls_schema(tools: Sequence[Tool], *, one: bool) -> dict[str, Any]:
    """The schema of calls, in which each tool's own has a place of its own."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        place = f"tool{index}"
        definitions[place] = _moved(parameters_of(tool), f"#/$defs/{place}")
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
