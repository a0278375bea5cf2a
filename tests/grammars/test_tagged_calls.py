"""Calls whose arguments stand between tags: what a schema takes is what can be drawn, and comes
back from the parser as it was meant."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from aioserve import InvalidSamplingError
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.parts import whole_calls
from aioserve.text.output_parsers.registry import TOOL_PARSERS
from tests.grammars.test_calls import END_ID, VOCABULARY, Drawn
from tests.text.test_tagged_calls import STYLES, written

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Anything."},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-c]+/\\d$"},
        "unit": {"enum": ["C", "F", "C F"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "word": {"$ref": "#/$defs/word", "description": "One of two."},
        "count": {"type": "integer", "minimum": 3, "maximum": 12},
        "on": {"type": ["boolean", "null"]},
        "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
        "any": {},
    },
    "required": ["text", "short", "count", "place"],
    "$defs": {
        "word": {"type": "string", "enum": ["one", "two"]},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


def tools_of(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def grammar_of(style: str, parameters: dict[str, Any], **specials: int) -> CompiledGrammar:
    shape = Style(tools=style, specials=specials)
    output = calls_output(shape, tools_of(parameters), frozenset(["f"]), one=False)
    return compile_grammar(VOCABULARY[1], output)


def read(style: str, text: str, parameters: dict[str, Any]) -> list[str]:
    parser = TOOL_PARSERS[style](None, ArgumentTypes(tools_of(parameters)))
    parts = [parser.push(text), parser.finish()]
    return [call.arguments for call in whole_calls(d for part in parts for d in part.tool_calls)]


VALUES = ["null", "None", " null ", "true", "12", "one", "C F", "ab/5", "[", '["a"]', '{"x": "']


@pytest.mark.parametrize("name", PARAMETERS["properties"])
@pytest.mark.parametrize("style", STYLES)
def test_what_is_drawn_is_read_as_the_schema_takes_it(style: str, name: str) -> None:
    parameters = {
        **PARAMETERS,
        "properties": {name: PARAMETERS["properties"][name], "unit": {"enum": ["C", "F"]}},
        "required": [name],
    }
    grammar = grammar_of(style, parameters)
    begun, ends = written(style, "f", [(name, "|")], "\n").split("|")
    closing = f"\n{TOOL_PARSERS[style].marks[-2]}" if style == "qwen3_coder" else "</arg_value>"
    lures = [*VALUES, *[value + ends for value in VALUES], ends, closing, f"{closing[:-1]}x"]
    num_whole = 0
    for seed in range(60):
        drawn = Drawn(grammar, VOCABULARY[0], seed, begun, lures)
        calls = read(style, drawn.text, parameters)
        for arguments in calls if drawn.has_ended else calls[:-1]:
            jsonschema.validate(json.loads(arguments), parameters)
            num_whole += 1
    assert num_whole > 9, "too little was drawn to say anything"


@pytest.mark.parametrize(
    ("schema", "value", "is_taken"),
    [
        ({"type": "string"}, "12 \n\n and <tags>", True),
        ({"type": "string", "maxLength": 3}, "abc", True),
        ({"type": "string", "maxLength": 3}, "abcd", False),
        ({"type": "string", "minLength": 3}, "ab", False),
        ({"type": "string", "pattern": "b/"}, "ab/c", True),
        ({"type": "string", "pattern": "b/"}, "abc", False),
        ({"type": "string", "pattern": "^b$"}, "b", True),
        ({"type": "string", "pattern": "^b$"}, "bb", False),
        ({"enum": ["a", "ab"]}, "a", True),
        ({"enum": ["a", "ab"]}, "ab", True),
        ({"enum": ["a", "ab"]}, "abc", False),
        ({"const": "a"}, "a", True),
        ({"type": ["string", "null"]}, "null", True),
        ({"type": ["string", "null"]}, "nullable", True),
        ({"type": ["string", "null"], "minLength": 9}, "null", True),
        ({"type": ["string", "null"], "minLength": 9}, "None", False),
        ({"type": "integer"}, "12", True),
        ({"type": "integer"}, "twelve", False),
        ({"type": "boolean"}, "true", True),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", True),
        ({"type": "array", "items": {"type": "integer"}}, '["1"]', False),
        ({"type": "array"}, '["</arg_value>", "</parameter>"]', True),
        ({}, "anything, 5", True),
        (True, "5", True),
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_a_value_is_held_to_its_schema(style: str, schema: Any, value: str, is_taken: bool) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    text = written(style, "f", [("a", value)], "\n")
    matcher = grammar_of(style, parameters).matcher({END_ID})
    taken = all(matcher.accept(token_id) for token_id in text.encode())
    assert (taken and matcher.is_accepting) is is_taken
    if is_taken:
        (arguments,) = read(style, text, parameters)
        jsonschema.validate(json.loads(arguments), parameters)


@pytest.mark.parametrize("style", STYLES)
def test_arguments_that_no_property_names_are_free_where_there_are_no_properties(
    style: str,
) -> None:
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    for parameters, value, is_taken in (
        (numbers, "1", True),
        (numbers, "one", False),
        ({"type": "object"}, "one", True),
        ({"type": "object", "additionalProperties": False}, "1", False),
    ):
        text = written(style, "f", [("a b", value), ("c", value)], "\n")
        matcher = grammar_of(style, parameters).matcher({END_ID})
        taken = all(matcher.accept(token_id) for token_id in text.encode())
        assert (taken and matcher.is_accepting) is is_taken


def test_tags_may_be_special_tokens() -> None:
    tokenizer = VOCABULARY[0]
    (special,) = tokenizer.encode("[ARGS]")
    names = ("text", "unit", "list")
    parameters = {"type": "object", "properties": {n: PARAMETERS["properties"][n] for n in names}}
    matcher = grammar_of("glm45", parameters, **{"</arg_value>": special}).matcher({END_ID})
    members = [("text", "a b"), ("unit", "C"), ("list", '["a"]')]
    text = written("glm45", "f", members, "\n").replace("</arg_value>", "[ARGS]")
    assert all(matcher.accept(token_id) for token_id in tokenizer.encode(text))
    assert matcher.is_accepting


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"properties": {"a": {"type": ["string", "integer"]}}}, "one that takes strings"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "one that takes strings"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "one that takes strings"),
        ({"properties": {"a": False}}, "one that takes strings"),
        ({"properties": {"a>": {}}}, "the name 'a>'"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties beside properties"),
        ({"required": ["b"], "additionalProperties": False}, "a required name 'b'"),
        ({"properties": {"a": {"enum": ["</arg_value>", "</parameter>"]}}}, "no value with </"),
        ({"properties": {"a": {"enum": ["a", "b"], "maxLength": 1}}}, "enum or const with nothing"),
        ({"properties": {"a": {"type": "string", "pattern": 5}}}, "patterns of type str"),
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_what_cannot_be_told_without_quotes_is_refused(
    style: str, parameters: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidSamplingError, match="tools must have") as told:
        grammar_of(style, {"type": "object", **parameters})
    assert why in str(told.value)
    assert told.value.argument == "tools"
