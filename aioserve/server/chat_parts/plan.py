"""Plan of a completion: text, structured output, calls that the model may make, or must make.

A call that must be made is structured output like any other, so it can't fail. Its schema is that
of a list of calls, or of the arguments of the named function. The plan also says how to read the
completion. But a model that writes calls in channels is held to calls there (`fitted`). The engine
holds calls that the model may make to their schemas, if tools are strict.

Tools and choices have the format of `/v1/chat/completions`, and other APIs convert theirs. They
mean the same in all APIs; only their names differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import msgspec

from aioserve.config import ToolParserName
from aioserve.engine.interface import ModelFacts
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.sampling import RequestedForm, check_at_most, check_schema
from aioserve.server.errors import ApiError, refuse
from aioserve.server.hint_tables import OF_TOOLS, Hints
from aioserve.server.settings import ServerSettings
from aioserve.structured_output import StructuredOutput

__all__ = [
    "AnswerPlan",
    "Choice",
    "NamedTool",
    "ResponseFormat",
    "Tool",
    "allowed_tools",
    "calls_schema",
    "fitted",
    "form_field",
    "json_object",
    "json_schema",
    "named_tool",
    "parameters_of",
    "planned",
    "tool",
]


class Function(Strict, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. Without one, the function takes no arguments."""
    strict: bool | None = None
    """True if arguments must follow the schema. They always do if the answer must be a call."""


class Tool(Strict, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_TOOLS

    type: Literal["function"]
    function: Function

    @property
    def as_dict(self) -> dict[str, Any]:
        """The tool as the chat template reads it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": "function", "function": function}


class FunctionChoice(Strict, frozen=True, kw_only=True):
    name: str


class NamedTool(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: FunctionChoice


class AllowedTool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(Strict, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedToolsChoice(Strict, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Choice of some of the tools. The model sees no others."""

    allowed_tools: AllowedTools


class JsonSchemaFormat(Strict, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None
    """Has no effect: the answer always follows the schema."""


class Structure(Strict, frozen=True, kw_only=True):
    begin: str
    schema: dict[str, Any] | bool | None = None
    """Schema of the part; any JSON without one."""
    end: str


class ResponseFormat(Strict, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """Schema of a `json_object`, as llama.cpp's clients give it."""
    structures: list[Structure] | None = None
    """Parts of a structural tag, like `triggers` and `at_least_one`."""
    triggers: list[str] | None = None
    at_least_one: bool | None = None

    @property
    def structural_tag(self) -> dict[str, Any]:
        """Structural tag as `StructuredOutput` takes it. Raises `ApiError` if a part is missing."""
        for field in ("structures", "triggers"):
            if getattr(self, field) is None:
                raise refuse(f"response_format.{field}", "is missing")
        return {
            "structures": msgspec.to_builtins(self.structures),
            "triggers": self.triggers,
            "at_least_one": bool(self.at_least_one),
        }


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


def tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(type="function", function=function)


def named_tool(name: str) -> NamedTool:
    """Choice of the tool of this name."""
    return NamedTool(function=FunctionChoice(name=name))


def allowed_tools(mode: Literal["auto", "required"], names: Sequence[str]) -> AllowedToolsChoice:
    """Choice of some tools."""
    tools = [AllowedTool(type="function", function=FunctionChoice(name=name)) for name in names]
    return AllowedToolsChoice(allowed_tools=AllowedTools(mode=mode, tools=tools))


def json_object() -> ResponseFormat:
    return ResponseFormat(type="json_object")


def json_schema(schema: dict[str, Any]) -> ResponseFormat:
    wanted = JsonSchemaFormat(name="answer", schema=schema)
    return ResponseFormat(type="json_schema", json_schema=wanted)


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments, which is that of an object. Raises `ApiError` for another
    type."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise refuse("tools", f"must have parameters of type object, as {tool.function.name!r:.99}")
    return {"type": "object", **schema}


def calls_schema(tools: Sequence[Tool], *, one: bool) -> dict[str, Any]:
    """Schema of a list of calls, or of `one` call. Each tool's own schema has its place in
    `$defs`."""
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
"""Deepest schema that the engine takes."""


def _moved(schema: Any, place: str, depth: int = 0) -> Any:
    """Copy of a schema, whose references from its root begin at `place`."""
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


NO_FORMS = ("auto", "none")
NOT_BOTH_AS_LIKED = (
    "goes with tools only where tool_choice is none, as it isn't about JSON: where tool_choice is "
    "auto, json_schema and json_object do"
)


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments for the engine, and the way to read its completion."""

    form: StructuredOutput | None = None
    """Structured output of the completion. If calls are read as the model writes them, it applies
    to answers without calls."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model sees."""
    reads_calls: bool = False
    """True if calls are read as the model writes them."""
    reads_list: bool = False
    """True if the completion is a list of calls as JSON, and nothing else."""
    function: str | None = None
    """Name of the function whose arguments are the completion, and nothing else."""
    one_call: bool = False
    """True if only the first call is returned."""
    strict: tuple[str, ...] = ()
    """Functions that the model may call, with arguments that follow their schemas."""
    required: tuple[str, ...] = ()
    """Functions of which one must be called."""
    max_whitespace: int | None = None
    """Limit on white space in these calls, as in `StructuredOutput`."""

    def content_of(self, content: str) -> str:
        """Content to return. A list of calls has none: its unread rest is a call that was cut off,
        in a form that no client asked for."""
        return "" if self.reads_list else content

    @property
    def holds_calls(self) -> bool:
        """True if calls that are read as the model writes them must follow a form."""
        is_held = self.required or self.form is not None
        return bool(self.strict) or (self.reads_calls and bool(is_held))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `Engine.chat`, besides those of every request."""
        parser = "json" if self.reads_list else "auto" if self.reads_calls else "none"
        options: dict[str, Any] = {"tools": self.tools, "tool_parser": parser}
        if self.holds_calls:
            options |= {
                "strict_tools": self.strict,
                "required_tools": self.required,
                "parallel_tool_calls": not self.one_call,
                "max_whitespace": self.max_whitespace,
            }
        return options


def fitted(facts: ModelFacts, plan: AnswerPlan) -> AnswerPlan:
    """Return the plan as this model can follow it. Raises `ApiError` if its template doesn't read
    tools, or if its calls can't be read. The message says what callers and operators can do."""
    if plan.tools is None:
        return plan
    if not facts.reads("tools"):
        raise refuse(
            "tools",
            "aren't supported by this model: its chat template doesn't read them. Leave them out, "
            "or ask for an answer of some form; who runs the server can give a template that "
            "reads them: aioserve serve --chat-template FILE",
        )
    if plan.reads_calls and not facts.reads_tool_calls:
        names = ", ".join([name for name in get_args(ToolParserName) if name not in NO_FORMS])
        raise refuse(
            "tools",
            "can't be called as the model likes: nothing in its chat template tells in which form "
            "it writes calls. Say in tool_choice that a tool must be called, or which, or leave "
            "tools out; who runs the server can name the form: aioserve serve --tool-parser NAME, "
            f"one of {names}",
        )
    if plan.required and facts.calls_in_channels:
        one = plan.one_call or plan.function is not None
        as_written = {"form": None, "function": None, "reads_list": False, "reads_calls": True}
        return msgspec.structs.replace(plan, one_call=one, **as_written)
    return plan


def planned(
    settings: ServerSettings,
    *,
    tools: Sequence[Tool],
    choice: Choice,
    one_call: bool,
    form: ResponseFormat | None,
    asked_form: RequestedForm | None = None,
    names: Mapping[str, str] = {},
) -> AnswerPlan:
    """Plan an answer from the fields of a body.

    Raises `ApiError` for contradictions and for values above their limits. Errors have the API's
    own `names` for `response_format`, and for `function.` before a tool's fields. Raises
    `InvalidSamplingError` for a form that can't be one.
    """
    try:
        _check_sizes(settings, tools, form)
        spacing = None if asked_form is None else asked_form.outputs.spacing
        calls = _calls(settings, tools, choice, one_call=one_call)
        text = _form(form, asked_form if spacing is None else None)
        if calls is None:
            return _spaced(AnswerPlan(form=text), spacing)
        if text is not None:
            calls = _beside(calls, text, form_field(form, asked_form, "response_format"))
        return _spaced(calls, spacing)
    except ApiError as error:
        param = error.param or ""
        for name, own in names.items():
            param = param.replace(name, own)
        message = error.message.replace(error.param or "", param, 1)
        raise ApiError(error.status, message, param=param, code=error.code) from error


def _check_sizes(
    settings: ServerSettings, tools: Sequence[Tool], form: ResponseFormat | None
) -> None:
    for each in tools:
        check_schema("tools", each.function.parameters, settings)
    if form is not None and form.json_schema is not None:
        check_schema("response_format", form.json_schema.schema, settings)
    if form is not None and form.schema is not None:
        check_schema("response_format", form.schema, settings)
    if form is not None and form.structures is not None:
        schemas = [one.schema for one in form.structures]
        check_schema("response_format", schemas, settings)


def _calls(
    settings: ServerSettings, tools: Sequence[Tool], choice: Choice, *, one_call: bool
) -> AnswerPlan | None:
    """Plan the calls; None if the model sees no tool."""
    if not tools:
        if choice not in ("none", "auto"):
            raise refuse("tool_choice", "names what must be called, and there are no tools")
        return None
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise refuse("tools", "must have functions of different names")
    if isinstance(choice, AllowedToolsChoice):
        return _calls_of_some(settings, by_name, choice.allowed_tools, one_call=one_call)
    if choice == "none":
        return None
    shown = [tool.as_dict for tool in tools]
    if choice == "auto":
        return AnswerPlan(
            tools=shown,
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
        form = StructuredOutput(json_schema=schema)
        return AnswerPlan(form=form, tools=shown, function=name, required=(name,))
    schema = calls_schema(tools, one=one_call)
    check_schema("tools", schema, settings)
    return AnswerPlan(
        form=StructuredOutput(json_schema=schema),
        tools=shown,
        reads_list=True,
        one_call=one_call,
        required=tuple(by_name),
    )


def _calls_of_some(
    settings: ServerSettings, by_name: Mapping[str, Tool], allowed: AllowedTools, *, one_call: bool
) -> AnswerPlan | None:
    check_at_most("tool_choice", "have at most {} tools", len(allowed.tools), settings.max_tools)
    names = {each.function.name: None for each in allowed.tools}
    if not names:
        raise refuse("tool_choice", "must allow at least one tool; none forbids all")
    for name in names:
        if name not in by_name:
            raise refuse("tool_choice", f"names the function {name!r:.300}, which isn't in tools")
    tools = [tool for name, tool in by_name.items() if name in names]
    return _calls(settings, tools, allowed.mode, one_call=one_call)


def _beside(calls: AnswerPlan, text: StructuredOutput, field: str) -> AnswerPlan:
    """Return the plan of answers that are calls, or else have the form `text`.

    A required call leaves no other answer, so the form then applies to later turns. Raises
    `ApiError` if the two can't be combined.
    """
    if calls.required:
        if text.whitespace is None or calls.form is None:
            return calls
        form = msgspec.structs.replace(calls.form, max_whitespace=text.whitespace)
        return msgspec.structs.replace(calls, form=form, max_whitespace=text.whitespace)
    if text.kind not in ("json_schema", "json_object"):
        raise refuse(field, NOT_BOTH_AS_LIKED)
    return msgspec.structs.replace(calls, form=text, max_whitespace=text.whitespace)


def _spaced(plan: AnswerPlan, spacing: Mapping[str, Any] | None) -> AnswerPlan:
    """Return the plan with this white space in its JSON. Raises `ApiError` if it has no JSON."""
    if spacing is None:
        return plan
    if plan.form is None and not plan.strict:
        raise refuse(
            "structured_outputs",
            "says how much white space JSON may have, and nothing asks for JSON of some form",
        )
    whitespace = StructuredOutput(json_object=True, **spacing).whitespace
    form = None if plan.form is None else msgspec.structs.replace(plan.form, **spacing)
    return msgspec.structs.replace(plan, form=form, max_whitespace=whitespace)


_OF_TYPES = {
    "json_schema": "json_schema",
    "schema": "json_object",
    "structures": "structural_tag",
    "triggers": "structural_tag",
    "at_least_one": "structural_tag",
}
"""Type of `response_format` that each of its fields goes with."""


def _form(wanted: ResponseFormat | None, asked: RequestedForm | None) -> StructuredOutput | None:
    """Return the structured output of a completion that is text; None if any text will do."""
    for field, kind in _OF_TYPES.items():
        if wanted is not None and wanted.type != kind and getattr(wanted, field) is not None:
            raise refuse(f"response_format.{field}", f"goes with the type {kind} alone")
    if wanted is None or wanted.type == "text":
        return None if asked is None else asked.outputs.form
    if asked is not None:
        raise refuse(asked.field, "and response_format ask for a form both")
    if wanted.type == "json_object" and wanted.schema:  # {} allows any object
        return StructuredOutput(json_schema=wanted.schema)
    if wanted.type == "json_object":
        return StructuredOutput(json_object=True)
    if wanted.type == "structural_tag":
        return StructuredOutput(structural_tag=wanted.structural_tag)
    if wanted.json_schema is None:
        raise refuse("response_format.json_schema", "is missing")
    return StructuredOutput(json_schema=wanted.json_schema.schema)


def form_field(wanted: ResponseFormat | None, asked: RequestedForm | None, otherwise: str) -> str:
    """Field that asks for the form of the text; `otherwise` if none does."""
    if wanted is not None and wanted.type != "text":
        return "response_format"
    return otherwise if asked is None else asked.field
