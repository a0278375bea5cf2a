"""Tools, choices among them and forms of text, as a body asks for them.

They are written as in bodies of `/v1/chat/completions`; other APIs make the same of what they have.
"""

from __future__ import annotations

from typing import Any, Literal

from aioserve.server.bodies import Strict

__all__ = [
    "Choice",
    "NamedTool",
    "ResponseFormat",
    "Tool",
    "json_object",
    "json_schema",
    "named_tool",
    "tool",
]


class Function(Strict, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; none is one without properties."""
    strict: bool | None = None
    """Arguments have the schema's form. They always have where the answer must be a call."""


class Tool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function

    @property
    def told(self) -> dict[str, Any]:
        """What the model hears of it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": "function", "function": function}


class FunctionChoice(Strict, frozen=True, kw_only=True):
    name: str


class NamedTool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionChoice


class JsonSchemaFormat(Strict, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None
    """The answer has the schema's form whatever this says."""


class ResponseFormat(Strict, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Choice = Literal["none", "auto", "required"] | NamedTool


def tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(type="function", function=function)


def named_tool(name: str) -> NamedTool:
    """The choice of that tool."""
    return NamedTool(type="function", function=FunctionChoice(name=name))


def json_object() -> ResponseFormat:
    return ResponseFormat(type="json_object")


def json_schema(schema: dict[str, Any]) -> ResponseFormat:
    wanted = JsonSchemaFormat(name="answer", schema=schema)
    return ResponseFormat(type="json_schema", json_schema=wanted)
