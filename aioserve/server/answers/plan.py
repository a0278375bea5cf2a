"""What a body wants its answer to be: text, a form, calls of tools if the model likes, or
calls that it must make.

A call that must be made is a form like any other, so it can't fail: the schema of a list of calls,
or of the arguments of the one function that was named. Knows how such answers are read again. Calls
that the model makes if it likes are the engine's to hold to their form, where tools are strict.
A choice that forces a call, a form, tools and one call at most mean the same in all APIs; only
their names differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from aioserve.config import ToolParserName
from aioserve.engine.engine import Engine
from aioserve.server.answers.call_schemas import calls_schema, parameters_of
from aioserve.server.answers.forms import Choice, NamedTool, ResponseFormat, Tool
from aioserve.server.answers.limits import check_at_most, check_schema
from aioserve.server.answers.sampling import StructuredOutputs
from aioserve.server.errors import ApiError, refuse
from aioserve.server.settings import ServerSettings
from aioserve.structured_output import StructuredOutput

__all__ = ["AnswerPlan", "check_tools", "planned"]

NO_FORMS = ("auto", "none")
NOT_BOTH = "goes with tools only where tool_choice is none: an answer of that form is text"


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


def check_tools(engine: Engine, plan: AnswerPlan) -> None:
    """Raise `ApiError` for tools that the model can't be told of, or whose calls nobody could read:
    with what a caller can do, and who runs the server."""
    if plan.tools is None:
        return
    if not engine.template_reads("tools"):
        raise refuse(
            "tools",
            "aren't supported by this model: its chat template doesn't read them. Leave them out, "
            "or ask for an answer of some form; who runs the server can give a template that "
            "reads them: aioserve serve --chat-template FILE",
        )
    if plan.reads_calls and not engine.reads_tool_calls:
        names = ", ".join([name for name in get_args(ToolParserName) if name not in NO_FORMS])
        raise refuse(
            "tools",
            "can't be called as the model likes: nothing in its chat template tells in which form "
            "it writes calls. Say in tool_choice that a tool must be called, or which, or leave "
            "tools out; who runs the server can name the form: aioserve serve --tool-parser NAME, "
            f"one of {names}",
        )


def planned(
    settings: ServerSettings,
    *,
    tools: Sequence[Tool],
    choice: Choice,
    one_call: bool,
    form: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None = None,
    names: Mapping[str, str] = {},
) -> AnswerPlan:
    """Raises `ApiError` for what contradicts itself or is too much, with the `names` of the API for
    `response_format` and `function.`, which stands before a tool's fields; and
    `InvalidSamplingError` for a form that can't be one."""
    try:
        _check_sizes(settings, tools, form)
        calls = _calls(settings, tools, choice, one_call=one_call)
        text = _form(form, structured_outputs)
        if calls is None:
            return AnswerPlan(form=text)
        if text is not None:
            field = "response_format" if structured_outputs is None else "structured_outputs"
            raise refuse(field, NOT_BOTH)
        return calls
    except ApiError as error:
        param = error.param or ""
        for name, own in names.items():
            param = param.replace(name, own)
        message = error.message.replace(error.param or "", param, 1)
        raise ApiError(error.status, message, param=param, code=error.code) from error


def _check_sizes(
    settings: ServerSettings, tools: Sequence[Tool], form: ResponseFormat | None
) -> None:
    check_at_most("tools", "have at most {} entries", len(tools), settings.max_tools)
    for each in tools:
        check_schema("tools", each.function.parameters, settings)
    if form is not None and form.json_schema is not None:
        check_schema("response_format", form.json_schema.schema, settings)


def _calls(
    settings: ServerSettings, tools: Sequence[Tool], choice: Choice, *, one_call: bool
) -> AnswerPlan | None:
    """None where the model hears of no tool."""
    if not tools:
        if choice not in ("none", "auto"):
            raise refuse("tool_choice", "names what must be called, and there are no tools")
        return None
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise refuse("tools", "must have functions of different names")
    if choice == "none":
        return None
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
        schema = parameters_of(by_name[name])
        check_schema("tools", schema, settings)
        return AnswerPlan(form=StructuredOutput(json_schema=schema), tools=told, function=name)
    schema = calls_schema(tools, one=one_call)
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
