"""Structured output that holds calls of tools to their schemas, and leaves the rest free.

    Sure. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call> Wait for it.
    free      │       one of the names, and what its schema takes         │         free

Or it holds all of the completion, which is then only calls, or else JSON of a form
(`CallsOutput.form`).

A call begins where the parser of that style (`aioserve.text.output_parsers`) begins to read one.
That is at a mark, or where the completion starts with a brace. So the free text is exactly the text
that no call begins in. Special tokens come where a mark is one, and nowhere else. In the text they
would vanish, and could hide a mark that they interrupt.

Knows how each style is written. Must not know how tokens spell it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.call_likeness import may_be_call
from aioserve.grammars.call_rules import (
    SPACE,
    Rules,
    Style,
    bare_or_form,
    marked,
    refused,
    text_of,
    words,
)
from aioserve.grammars.channels import harmony_calls
from aioserve.grammars.schema import json_rule, spelled_anew
from aioserve.grammars.tagged_calls import tagged
from aioserve.structured_output import MAX_CHARS, StructuredOutput
from aioserve.text.output_parsers import families
from aioserve.text.output_parsers.call_object import MAX_NAME_CHARS
from aioserve.text.output_parsers.harmony import HarmonyParser
from aioserve.text.output_parsers.marked_json import MarkedJsonParser
from aioserve.text.output_parsers.tagged import Glm45Parser, Qwen3CoderParser
from aioserve.text.output_parsers.tool_parser import MAX_WORD_CHARS, ToolParser

__all__ = ["CallsOutput", "calls_output", "calls_source"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class CallsOutput(StructuredOutput, frozen=True, kw_only=True):
    """Structured output with calls. `grammar` is all except the arguments of the calls."""

    schemas: tuple[str, ...] = ()
    """Schemas of arguments, as JSON text: `args0` stands for the first, and so on."""
    max_whitespace_in_calls: int | None = None
    """Form of white space in the JSON of calls, like `max_whitespace`."""
    form: StructuredOutput | None = None
    """JSON that a completion without calls must be. None: any text."""

    @property
    def whitespace(self) -> int | None:
        return self.max_whitespace_in_calls


def calls_output(
    style: Style,
    tools: Sequence[Mapping[str, Any]],
    strict: Set[str],
    *,
    one: bool,
    max_whitespace: int | None = None,
    form: StructuredOutput | None = None,
    required: Set[str] = frozenset(),
) -> CallsOutput:
    """Make the structured output of completions with calls of `tools`, as a chat template has them.

    Arguments of the tools in `strict` are what their parameters take, those of others any object.
    With `one` there is at most one call. `max_whitespace` is that of `StructuredOutput`, for the
    JSON of calls.

    With `form`, JSON, completions are calls, or else of that form, and there is no other text. If
    the style has no mark for calls, a form whose values may look like a call is refused. With
    `required` tools, completions are calls of these, which are strict, and nothing else.

    Raises `InvalidSamplingError`.
    """
    functions = [tool["function"] for tool in tools]
    if required:
        functions = [function for function in functions if function["name"] in required]
        strict = strict | required
    names = [_name(function, index) for index, function in enumerate(functions)]
    parameters = [
        _parameters(function) if name in strict else _ANY_OBJECT
        for function, name in zip(functions, names, strict=True)
    ]
    if form is not None:
        _check_form(form, style)
    rules = Rules(
        style,
        names,
        parameters,
        one=one,
        max_whitespace=max_whitespace,
        alone=bool(required),
        or_form=form is not None,
    )
    _rules_of(style.parser)(rules)
    schemas = tuple(rules.schemas)
    if (chars := sum(map(len, schemas))) > MAX_CHARS:
        raise refused(f"have parameters of at most {MAX_CHARS} characters, got {chars}")
    grammar = rules.text()
    if len(grammar) > MAX_CHARS:
        raise refused("have shorter names, or be fewer, where one is strict")
    return CallsOutput(
        grammar=grammar, schemas=schemas, max_whitespace_in_calls=max_whitespace, form=form
    )


def _check_form(form: StructuredOutput, style: Style) -> None:
    """Raise `InvalidSamplingError` for a form that has values which look like a call."""
    parser = style.parser
    if parser.opens or parser is HarmonyParser:
        return
    schema = True if form.json_schema is None else json.loads(str(form.json_schema))
    if may_be_call(schema, schema, lists=parser.takes_lists):
        raise InvalidSamplingError(
            f"{form.kind} must take no object with a name and arguments where there are tools: "
            f"calls of this model ({parser.name}) are JSON without a mark, as is the form. "
            "Give its objects additionalProperties: false",
            argument=form.kind,
        )


def calls_source(output: CallsOutput) -> str:
    """Return the whole grammar, as llguidance takes it.

    Raises `InvalidSamplingError`, and `ValueError` for a form that nothing fits.
    """
    lines = [output.grammar or ""]
    if (form := output.form) is not None:
        schema = str(form.json_schema) if form.json_schema is not None else '{"type":"object"}'
        lines.append(json_rule("form", schema, form.kind, form.whitespace))
    for index, schema in enumerate(output.schemas):
        lines.append(json_rule(f"args{index}", schema, "tools", output.whitespace))
    return "\n".join(lines) + "\n"


def _marked_json(rules: Rules, parser: type[MarkedJsonParser]) -> None:
    rules.calls(parser.arguments_key)
    calls = "call"
    if parser.in_list:
        rules.add(_list_of(rules))
        calls = "list"
    behind = f" WS? {rules.mark(parser.mark_behind)}" if parser.mark_behind else ""
    rules.add(f"held: WS? {calls}{behind}")
    marked(rules, parser.mark_before)


def _llama3(rules: Rules) -> None:
    rules.calls("parameters")
    rules.add("held: WS? calls", "bare: WS? calls")
    rules.add("calls: call" if rules.one else "calls: call (BETWEEN call)*")
    rules.add(f"BETWEEN: /({rules.space})?[;,]?({rules.space})?/")
    if rules.or_form:
        bare_or_form(rules, f"({rules.mark(families.LLAMA3_TAG)} WS?)? calls")
        return
    rules.texts(families.LLAMA3_TAG, "_AFTER", [rf"{SPACE}*[;,]?{SPACE}*\{{"])
    marked(rules, families.LLAMA3_TAG, starts=[rf"{SPACE}*\{{"], after="_AFTER")


def _mistral(rules: Rules) -> None:
    rules.calls("arguments")
    rules.add(_list_of(rules))
    begin = f"({rules.mark(families.MISTRAL_CALL_ID)} ID)? {rules.mark(families.MISTRAL_ARGS)} WS?"
    named = [f"{text_of(name)} {begin} {rules.args(index)}" for index, name in words(rules)]
    rules.add("held: WS? (" + " | ".join(["list", *named]) + ")", "ID: /[A-Za-z0-9]{9}/")
    marked(rules, families.MISTRAL_CALLS)


def _deepseek_v31(rules: Rules) -> None:
    sep = rules.mark(families.DEEPSEEK_SEP)
    _deepseek(
        rules, [f"{text_of(name)} {sep} WS? {rules.args(index)}" for index, name in words(rules)]
    )


def _deepseek_v3(rules: Rules) -> None:
    sep, fence = rules.mark(families.DEEPSEEK_SEP), families.DEEPSEEK_FENCE
    begin, end = f"WS? {text_of(f'{fence}json')} WS?", f"WS? {text_of(fence)}"
    heads = [(f'"function" {sep} {text_of(name)} {begin}', index) for index, name in words(rules)]
    _deepseek(rules, [f"{head} {rules.args(index)} {end}" for head, index in heads])


def _deepseek(rules: Rules, named: Sequence[str]) -> None:
    if len(named) < len(rules.names):
        raise refused(
            f"have names of letters, digits, '_', '-' and '.', at most {MAX_WORD_CHARS}, "
            "where one is strict and the model is of DeepSeek's"
        )
    rules.add(f"held: ({' | '.join(named)}) WS? {rules.mark(families.DEEPSEEK_CALL_END)}")
    around = families.DEEPSEEK_CALLS, families.DEEPSEEK_CALLS_END
    marked(rules, families.DEEPSEEK_CALL, around=around)


def _json(rules: Rules) -> None:
    rules.calls("arguments")
    rules.add(_list_of(rules))
    if rules.or_form:
        bare_or_form(rules, "list | call")
        return
    rules.add("bare: WS? (list | call) ANY")
    start = rf"{SPACE}*(\[{SPACE}*)?\{{"
    for rule, name, more in (("first", "_FIRST", rules.first_starts()), ("body", "_BODY", [])):
        rules.texts(None, name, [*more, start])
        rules.add(f"{rule}: bare | TEXT{name}")


def _list_of(rules: Rules) -> str:
    gap = rules.gap
    more = "" if rules.one else f' ({gap} "," {gap} call)*'
    return f'list: "[" {gap} call{more} {gap} "]"'


_FAMILIES: Mapping[str, Callable[[Rules], None]] = {
    "llama3_json": _llama3,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "glm45": lambda rules: tagged(rules, Glm45Parser),
    "qwen3_coder": lambda rules: tagged(rules, Qwen3CoderParser),
    "harmony": harmony_calls,
    "json": _json,
}


def _rules_of(parser: type[ToolParser]) -> Callable[[Rules], None]:
    """Return the function that adds the rules of a parser's format. Raises `InvalidSamplingError`
    for a format without known rules."""
    if issubclass(parser, MarkedJsonParser):
        return lambda rules: _marked_json(rules, parser)
    if parser.name not in _FAMILIES:
        raise refused(f"not be held to anything where {parser.name} reads the calls of a model")
    return _FAMILIES[parser.name]


def _name(function: Mapping[str, Any], index: int) -> str:
    name = function["name"]
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidSamplingError(
            f"tools[{index}]['function']['name'] must be a str of 1 to {MAX_NAME_CHARS} characters "
            f"that can be printed where a tool is strict, got {name!r:.300}",
            argument="tools",
            value=name,
        )
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the parameters of a function, an object."""
    schema = function.get("parameters")
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise refused(f"have parameters of type object, as {function['name']!r:.99}")
    return spelled_anew({"type": "object", **schema})
