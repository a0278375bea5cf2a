"""Tools and forms of any API, planned as those of `/v1/chat/completions` are.

A choice that forces a call, a form, tools and one call at most mean the same in all APIs; only
their names differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from aioserve.server.errors import ApiError
from aioserve.server.openai.answer_plan import AnswerPlan, plan_of
from aioserve.server.openai.chat_body import (
    Function,
    FunctionChoice,
    JsonSchemaFormat,
    NamedTool,
    ResponseFormat,
    Tool,
)
from aioserve.server.openai.limits import check_at_most, check_schema
from aioserve.server.sampling import StructuredOutputs
from aioserve.server.settings import ServerSettings

__all__ = ["json_object", "json_schema", "named_tool", "planned", "tool"]


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


def planned(
    settings: ServerSettings,
    *,
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool,
    one_call: bool,
    form: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None = None,
    names: Mapping[str, str],
) -> AnswerPlan:
    """Raises `ApiError` for what contradicts itself or is too much, with the `names` of the API for
    `response_format` and `function.`, which stands before a tool's fields; and
    `InvalidSamplingError` for a form that can't be one."""
    try:
        check_at_most("tools", "have at most {} entries", len(tools), settings.max_tools)
        for each in tools:
            check_schema("tools", each.function.parameters, settings)
        if form is not None and form.json_schema is not None:
            check_schema("response_format", form.json_schema.schema, settings)
        return plan_of(
            settings,
            tools=tools,
            choice=choice,
            one_call=one_call,
            response_format=form,
            structured_outputs=structured_outputs,
        )
    except ApiError as error:
        param = error.param or ""
        for name, own in names.items():
            param = param.replace(name, own)
        message = error.message.replace(error.param or "", param, 1)
        raise ApiError(error.status, message, param=param, code=error.code) from error
